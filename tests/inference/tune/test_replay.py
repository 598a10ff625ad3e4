"""A replay along known text accepts what decoding accepts, pass by pass."""

from __future__ import annotations

import math

import pytest
import torch

from heads.api.checkpoint import new_drafter
from heads.api.drafter import Proposal
from heads.api.registry import get_kind
from heads.api.tree import DraftShape, DynamicShape, TokenTree
from inference.decoding.config import DecodeConfig
from inference.decoding.engine import Engine
from inference.decoding.rules.accept import leading
from inference.tune import confidence
from inference.tune.replay import Replay
from tests.inference.decoding.test_lossless import requests
from tests.inference.decoding.test_lossless_kinds import drafter_of
from tests.models import random_target

SHAPES: list[DraftShape] = [
    TokenTree.chain(3),
    TokenTree.from_choices([[0], [1], [0, 0]]),
    DynamicShape(10, 3, 3),
]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", ["eagle3", "medusa", "distilled"])
@torch.no_grad()
def test_a_replay_takes_the_passes_of_decoding(kind: str, temperature: float) -> None:
    target, items = random_target(), requests(4, new=14)
    decode = DecodeConfig(temperature=temperature, batch_size=2, depth=3)
    drafter = drafter_of(kind, target)
    texts = Engine(target, None, decode).completions(items)
    replay = Replay(target, drafter, texts, temperature)
    for shape in SHAPES:
        engine = Engine(target, drafter, decode)
        engine.tree = shape
        expected = {str(item.request.index): item.passes for item in engine.run(items)}
        found = {outcome.prompt: outcome.passes for outcome in replay.outcomes(shape)}
        assert {row: [p.committed for p in passes] for row, passes in found.items()} == {
            row: [p.committed for p in passes] for row, passes in expected.items()
        }
        assert {row: [p.accepted for p in passes] for row, passes in found.items()} == {
            row: [p.accepted for p in passes] for row, passes in expected.items()
        }
        assert {row: [p.rejected for p in passes] for row, passes in found.items()} == {
            row: [p.rejected for p in passes] for row, passes in expected.items()
        }


@pytest.mark.parametrize("kind", ["eagle3", "distilled"])
@torch.no_grad()
def test_a_replay_records_how_sure_the_drafter_is(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against the decoder's own records, which are of the whole vocabulary."""
    target, items = random_target(), requests(3, new=10)
    monkeypatch.setattr(confidence, "CONSIDERED", target.info.vocab_size)
    decode, drafter = DecodeConfig(batch_size=3, depth=3), drafter_of(kind, target)
    texts = Engine(target, None, decode).completions(items)
    replay = Replay(target, drafter, texts, 0.0)
    found = replay.passes(TokenTree.chain(3), everywhere=True)
    assert [len(records) for records in found] == [len(item.tokens) - 1 for item in texts]
    for item in Engine(target, drafter, decode, details=True).run(items):
        place = 0
        for told in item.passes:
            record = found[item.request.index][place]
            assert (record.accepted, record.committed) == (told.accepted, told.committed)
            assert told.details is not None
            log_q = torch.tensor([one or 0.0 for one in told.details.log_q])
            assert record.confidence == pytest.approx(log_q.exp().tolist(), rel=1e-4)
            place += told.committed


class Ends:
    """Ends every chain before its first token below a probability."""

    wants_logits = True

    def __init__(self, least: float) -> None:
        self.least = least

    def limit(self, proposal: Proposal, active: torch.Tensor) -> torch.Tensor:
        sure = confidence.confidences(proposal)
        assert sure is not None
        return leading(sure >= self.least)


@pytest.mark.parametrize("kind", ["eagle3", "distilled"])
@torch.no_grad()
def test_passes_at_every_position_hold_those_of_every_threshold(kind: str) -> None:
    target, items = random_target(), requests(4, new=24)
    values = {"distilled": {"from_target_layers": (0, 1)}, "eagle3": {}}[kind]
    config = get_kind(kind).config_class(**values)
    drafter = new_drafter(kind, config, target.info, target.weights, seed=0).to(target.dtype)
    texts = sorted(
        Engine(target, None, DecodeConfig(batch_size=4)).run(items),
        key=lambda item: item.request.index,
    )
    replay, chain, seconds = (
        Replay(target, drafter, texts, 0.0),
        TokenTree.chain(4),
        [3, 4, 6, 7, 9],
    )
    found = confidence.speeds(replay.passes(chain, everywhere=True), seconds)
    for least, speed in list(zip(confidence.CANDIDATES, found, strict=True))[:8]:
        passes = [record for each in replay.passes(chain, Ends(least)) for record in each]
        tokens = sum(record.committed for record in passes)
        assert speed == pytest.approx(tokens / sum(seconds[record.live] for record in passes))
    assert len(set(found[:8])) > 3


def test_a_probability_is_that_among_the_ten_best_tokens() -> None:
    logits = torch.arange(12.0).roll(5).expand(1, 3, -1)
    expected = 1.0 / sum(math.exp(-rank) for rank in range(10))
    found = confidence.confidences(
        Proposal(torch.zeros(1, 3, dtype=torch.int64), TokenTree.chain(2), logits)
    )
    assert found is not None
    assert found[0].tolist() == pytest.approx([expected, expected])
