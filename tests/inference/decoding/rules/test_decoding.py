"""The rules in the real loop: a transformer of eight tokens, real drafters, thousands of seeds,
against the exact law of its texts.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from heads.api.checkpoint import new_drafter
from heads.api.drafter import Proposal
from heads.eagle3 import Config
from inference.decoding import buffers as lanes
from inference.decoding.config import DecodeConfig
from inference.decoding.engine import Engine
from inference.decoding.requests import Request
from inference.decoding.sampling.distribution import SamplingSettings, shape_logits
from inference.target.model import TargetModel
from tests.inference.decoding.rules.toys import CLEAR, CoinIsDraft, p_value
from tests.inference.decoding.test_lossless_kinds import drafter_of
from tests.models import random_model, random_target

VOCAB, TOKENS, SEEDS = 6, 4, 3_000
PROMPT = (1, 3, 5)
CHAIN = {"depth": 3}
TREE = {"shape": "tree", "choices": ((0,), (1,), (0, 0), (0, 1), (1, 0))}


def small_target() -> TargetModel:
    """Six tokens, none of which ends the text."""
    target = random_target(vocab_size=VOCAB)
    target.eos_token_ids = ()
    return target


def law(settings: SamplingSettings) -> Tensor:
    """Probability of every text of TOKENS tokens behind the prompt [V ** n], by the model's own
    forward."""
    model = random_model(vocab_size=VOCAB)
    texts, joint = torch.tensor([PROMPT]), torch.ones(1, dtype=torch.float64)
    for _ in range(TOKENS):
        logits = model(texts).logits[:, -1]
        p = shape_logits(logits, settings).softmax(-1)
        joint = (joint[:, None] * p).flatten()
        following = torch.arange(VOCAB).repeat(len(texts))[:, None]
        texts = torch.cat([texts.repeat_interleave(VOCAB, 0), following], 1)
    return joint


def sampled(rule: str, drafter: Any = None, **shape: Any) -> Tensor:
    """Texts [SEEDS, TOKENS] of as many seeds."""
    target = small_target()
    config = DecodeConfig(
        temperature=1.0, rule=rule, batch_size=500, max_new_tokens=TOKENS, **shape
    )
    engine = Engine(target, drafter or drafter_of("mtp", target), config)
    requests = [Request(seed, PROMPT, seed, TOKENS) for seed in range(SEEDS)]
    return torch.tensor([completion.tokens for completion in engine.run(requests)])


RULES = pytest.mark.parametrize(
    ("rule", "shape"),
    [("rejection", CHAIN), ("block", CHAIN), ("specinfer", TREE), ("traversal", TREE)],
    ids=lambda given: str(given)[:9],
)


@RULES
def test_texts_follow_the_target(rule: str, shape: dict[str, Any]) -> None:
    assert p_value(sampled(rule, **shape), law(SamplingSettings(1.0))) > 1e-3


def of_a_shortlist() -> Any:
    """A drafter that draws from three of six tokens at a time, other ones in every context."""
    config, target = Config(shortlist=4, shortlist_rank=2), small_target()
    drafter = new_drafter("eagle3", config, target.info, target.weights, seed=0)
    with torch.no_grad():  # another shortlist than the LM head's best
        for parameter in drafter.shortlist.parameters():
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
            parameter.copy_(noise)
    return drafter.eval()


@RULES
def test_texts_follow_the_target_where_few_tokens_can_be_drafted(
    rule: str, shape: dict[str, Any]
) -> None:
    """A shortlist is another one at every node: the rules are told what was drawn from it."""
    assert p_value(sampled(rule, of_a_shortlist(), **shape), law(SamplingSettings(1.0))) > 1e-3


@pytest.mark.parametrize(("rule", "shape"), [("rejection", CHAIN), ("specinfer", TREE)])
def test_a_shortlist_that_the_rules_are_not_told_of_is_noticed(
    rule: str, shape: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The distribution of the whole LM head is not the one that was drawn from."""
    drafter = of_a_shortlist()
    logits, propose = drafter.logits, drafter.propose
    drawn: list[Tensor] = []

    def noting(emitted: Tensor) -> Tensor:
        drawn.append(drafter.lm_head(emitted))
        return logits(emitted)

    def telling(state: Any, noise: Any) -> Proposal:
        drawn.clear()
        proposal = propose(state, noise)
        proposal.logits = torch.cat(drawn, 1)[:, state.plan.drawn_from]
        return proposal

    monkeypatch.setattr(drafter, "logits", noting)
    monkeypatch.setattr(drafter, "propose", telling)
    assert p_value(sampled(rule, drafter, **shape), law(SamplingSettings(1.0))) < CLEAR


@pytest.mark.parametrize(("rule", "shape"), [("rejection", CHAIN), ("specinfer", TREE)])
def test_coins_tossed_with_the_drafts_noise_are_noticed(
    rule: str, shape: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lanes, "SharedNoise", CoinIsDraft)
    assert p_value(sampled(rule, **shape), law(SamplingSettings(1.0))) < CLEAR


def test_the_loop_keys_noise_by_the_pass() -> None:
    """What block verification rests on: the noise is told the roots, and the loop moves the very
    tensor that it was told.
    """
    target = small_target()
    engine = Engine(
        target, drafter_of("eagle3", target), DecodeConfig(temperature=1.0, rule="block", depth=2)
    )
    run = engine.run([Request(0, PROMPT, 7, 12)])
    next(run)
    built = engine._kept.lanes
    assert built is not None
    assert built.runner.decoder.noise.roots is built.rows.lengths
