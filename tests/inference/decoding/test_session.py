"""Sessions: requests that come and go, each with settings of its own, give the text that the engine
gives for each alone."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from heads.api.errors import UserError
from inference.decoding.config import DecodeConfig
from inference.decoding.engine import Engine
from inference.decoding.requests import Request
from inference.decoding.rules.names import sampling_rule
from inference.decoding.sampling.distribution import SamplingSettings
from inference.decoding.sampling.noise import SharedNoise
from inference.decoding.sampling.row_settings import RowNoise, RowSettings
from inference.decoding.session import Session
from tests.heads.recipes import RECIPES
from tests.inference.decoding.test_lossless import SHAPES, requests
from tests.inference.decoding.test_lossless_kinds import drafter_of
from tests.models import plain_texts, random_target, texts_of

SETTINGS = (
    SamplingSettings(),
    SamplingSettings(temperature=0.7),
    SamplingSettings(temperature=1.3, top_k=7),
    SamplingSettings(temperature=1.0, top_p=0.8),
    SamplingSettings(temperature=0.9, min_p=0.1),
    SamplingSettings(temperature=1.0, top_k=20, top_p=0.9, min_p=0.02),
)


def mixed(count: int = 12) -> list[Request]:
    """Requests of different prompts, limits, seeds and settings."""
    base = requests(5)
    return [
        Request(i, base[i % 5].tokens, 100 + i, 5 + 7 * i % 19, SETTINGS[i % len(SETTINGS)])
        for i in range(count)
    ]


@cache
def alone(request: Request) -> list[int]:
    """What plain decoding, one request at a time, gives with the request's settings."""
    assert request.sampling is not None
    settings = {
        name: getattr(request.sampling, name) for name in ("temperature", "top_k", "top_p", "min_p")
    }
    return plain_texts([replace(request, sampling=None)], **settings)[request.index]


def served(session: Session, items: list[Request], every: int) -> dict[int, list[int]]:
    """Add one request after every few steps, so that rows fill, drain and fill again."""
    waiting, found, steps = list(items), {}, 0
    while waiting or session.unfinished:
        if waiting and steps % every == 0:
            session.add(waiting.pop(0))
        found |= {c.request.index: c.tokens for c in session.step()}
        steps += 1
    return found


@pytest.mark.rotated
@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize("shape", SHAPES)
def test_requests_with_settings_of_their_own_get_their_own_text(
    shape: str, lag: int, every: int
) -> None:
    target, items = random_target(), mixed()
    engine = Engine(
        target, drafter_of("eagle3", target), DecodeConfig(batch_size=4, lag=lag, **SHAPES[shape])
    )  # type: ignore[arg-type]
    with Session(engine, 60) as session:
        found = served(session, items, every)
    assert found == {item.index: alone(item) for item in items}


@pytest.mark.rotated
@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize(
    ("rule", "shape"),
    [
        ("rejection", "chain"),
        ("block", "chain"),
        ("auto", "chain"),
        ("specinfer", "tree"),
        ("traversal", "tree"),
        ("auto", "tree"),
        ("auto", "dynamic"),
    ],
)
def test_rules_that_weigh_drafts_give_every_request_its_own_text(
    rule: str, shape: str, lag: int
) -> None:
    """The text of an engine with the request's settings and what `rule` is there; at temperature 0
    that is plain decoding's, which no other row in the batch changes."""
    target, items = random_target(), mixed()
    drafter = drafter_of("eagle3", target)
    draft = {**SHAPES, "dynamic": {"shape": "dynamic", "nodes": 7, "depth": 3, "width": 3}}[shape]
    decode = DecodeConfig(batch_size=4, lag=lag, rule=rule, **draft)  # type: ignore[arg-type]
    with Session(Engine(target, drafter, decode), 60) as session:
        found = served(session, items, 2)
    changed = 0
    for item in items:
        own = item.sampling
        assert own is not None
        words = {name: getattr(own, name) for name in ("temperature", "top_k", "top_p", "min_p")}
        one = replace(decode, batch_size=1, rule=sampling_rule(rule, shape), **words)
        (expected,) = Engine(target, drafter, one).run([replace(item, sampling=None)])
        assert found[item.index] == expected.tokens, own
        plain = alone(item)
        assert not own.greedy or found[item.index] == plain
        changed += found[item.index] != plain
    # in a dynamic tree drafts are certain, and judged by the target's own pick
    assert changed > 2 if shape != "dynamic" else changed == 0


@pytest.mark.rotated
@pytest.mark.parametrize("name", RECIPES)
def test_every_kind_decodes_the_rows_in_use_alone(name: str) -> None:
    target, items = random_target(), mixed(5)
    engine = Engine(target, drafter_of(name, target), DecodeConfig(batch_size=3, depth=2))
    with Session(engine, 60) as session:
        found = served(session, items, 3)
    assert found == {item.index: alone(item) for item in items}


def test_a_session_computes_no_more_rows_than_it_has_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target, widths = random_target(), []
    verify = target.verify

    def watched(cache: Any, tokens: torch.Tensor, *rest: Any) -> Any:
        widths.append(tokens.shape[0])
        return verify(cache, tokens, *rest)

    monkeypatch.setattr(target, "verify", watched)
    items = [
        replace(requests(1)[0], index=i, max_new_tokens=new) for i, new in enumerate((3, 3, 3, 20))
    ]
    plain = texts_of(Engine(target), items)
    widths.clear()
    with Session(Engine(target, None, DecodeConfig(batch_size=6)), 60) as session:
        for item in items:
            session.add(item)
        assert session.free == 2
        found = {}
        while session.unfinished:
            found |= {c.request.index: c.tokens for c in session.step()}
    assert found == plain
    assert widths[:2] == [4, 4] and set(widths[2:]) == {1}  # the last one moved to the front


@pytest.mark.parametrize("lag", [0, 2])
def test_cancelled_requests_free_their_rows(lag: int) -> None:
    target, items = random_target(), mixed(6)
    engine = Engine(target, drafter_of("distilled", target), DecodeConfig(batch_size=2, lag=lag))
    with Session(engine, 60) as session:
        for item in items:
            session.add(item)
        session.step()
        session.cancel(items[0].index)
        session.cancel(items[5].index)
        session.cancel(999)
        done = []
        while session.unfinished:
            done += session.step()
    finish = {c.request.index: c.finish for c in done}
    assert {i for i, why in finish.items() if why == "cancelled"} == {0, 5}
    found = {c.request.index: c.tokens for c in done if c.finish != "cancelled"}
    assert found == {item.index: alone(item) for item in items[1:5]}


def test_a_change_that_fails_loses_no_answer_that_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a lag, answers end while the steps before the change are read."""
    target, items = random_target(), mixed(8)
    engine = Engine(target, drafter_of("distilled", target), DecodeConfig(batch_size=2, lag=2))
    done = []
    with Session(engine, 60) as session:

        def full(*_: object) -> None:
            raise RuntimeError("out of memory")

        monkeypatch.setattr(session._run, "change_drafter", full)
        for item in items:
            session.add(item)
        while session.unfinished:
            with pytest.raises(RuntimeError, match="out of memory"):
                session.change_drafter(drafter_of("distilled", target))
            done += session.step()
    assert {one.request.index: one.tokens for one in done} == {
        item.index: alone(item) for item in items
    }


def test_drafts_may_reach_beyond_the_last_learned_position() -> None:
    target = random_target("gpt2")
    longest = target.info.max_position_embeddings
    request = Request(0, tuple(3 + n % 90 for n in range(longest - 5)), 1, 5)
    config = DecodeConfig(depth=4, shape="none")
    (plain,) = Engine(target, None, config).run([request])
    drafted = Engine(target, drafter_of("medusa", target), replace(config, shape="chain"))
    with Session(drafted, longest) as session:
        session.add(request)
        done = []
        while session.unfinished:
            done += session.step()
    assert [one.tokens for one in done] == [plain.tokens]


def test_what_a_session_refuses() -> None:
    target = random_target()
    with pytest.raises(
        UserError, match=r"keeps the target's distribution.*given: decode.rule=typical"
    ):
        Session(Engine(target, None, DecodeConfig(rule="typical", temperature=1.0)), 60)
    with pytest.raises(UserError, match=r"2 to 256 positions .* given: 300"):
        Session(Engine(target), 300)
    with Session(Engine(target), 30) as session:
        with pytest.raises(
            UserError, match=r"prompt .25 tokens. and answer .up to 10. need 35 positions; 30"
        ):
            session.add(Request(0, (5,) * 25, 1, 10))
        with pytest.raises(UserError, match="token ids go from 0 to 96"):
            session.add(Request(0, (5, 97), 1, 10))
        with pytest.raises(UserError, match="at least one token"):
            session.add(Request(0, (), 1, 10))
        with pytest.raises(
            UserError,
            match=r"cannot bring a repetition_penalty of its own; given 1.2.*temperature, top_k",
        ):
            session.add(Request(0, (5,), 1, 4, SamplingSettings(repetition_penalty=1.2)))
        assert not session.unfinished
    with pytest.raises(UserError, match="only a session takes"):
        list(Engine(target).run([Request(0, (5,), 1, 4, SamplingSettings(temperature=1.0))]))


# The noise of rows


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_rows_pick_what_a_batch_of_their_settings_picks(dtype: torch.dtype, static: bool) -> None:
    torch.manual_seed(0)
    rows, nodes, vocab = 12, 3, 211
    logits = (torch.randn(rows, nodes, vocab) * 3).to(dtype)
    logits[:, :, 5] = logits[:, :, 6]  # ties
    positions, seeds = torch.arange(rows * nodes).view(rows, nodes), torch.arange(rows) * 77 + 1
    for given in (SETTINGS, SETTINGS[:1], SETTINGS[:2], SETTINGS[1:2], SETTINGS[2:]):
        held = [given[row % len(given)] for row in range(rows)]
        own = RowSettings(rows, SamplingSettings(), vocab, torch.device("cpu"), static)
        own.put(range(rows), held)
        own.arrange(range(rows))
        noise = RowNoise(own, seeds, vocab)
        picks, drafted, scores = (
            noise.target_pick(logits, positions),
            noise.pick(logits, positions),
            noise.scores(logits, positions),
        )
        for row, settings in enumerate(held):
            single = SharedNoise(settings, seeds[row : row + 1], vocab)
            part, place = logits[row : row + 1], positions[row : row + 1]
            assert torch.equal(picks[row : row + 1], single.target_pick(part, place)), settings
            assert torch.equal(drafted[row : row + 1], single.pick(part, place)), settings
            assert torch.equal(scores[row : row + 1], single.scores(part, place)), settings


def test_rows_that_are_not_decoded_do_not_decide_what_a_step_needs() -> None:
    own = RowSettings(3, SamplingSettings(), 50, torch.device("cpu"), False)
    own.put([2], [SamplingSettings(temperature=1.0, top_p=0.5)])
    modes = []
    for running in ([0], [0, 2], [1]):
        own.arrange(running)
        modes.append(own.mode)
    assert modes == [0, 2, 0]
