"""Drafting while the target verifies: the very drafts of drafting afterwards, whatever comes true."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from heads.api.checkpoint import save_drafter
from heads.api.drafter import Proposal, TargetStates
from heads.api.errors import UserError
from heads.api.state import Snapshot, state_tensors
from heads.nn.drafting import sight
from inference.decoding.ahead import AheadDrafter, Foreseen
from inference.decoding.config import DecodeConfig
from inference.decoding.draft import Draft
from inference.decoding.engine import Engine
from inference.decoding.placement import PlacedDrafter
from inference.decoding.requests import Completion, Request
from inference.decoding.sampling.distribution import SamplingSettings
from inference.decoding.session import Session
from inference.kernels.reference.attention import TREE_ATTENTION
from inference.target.model import TargetModel
from tests.heads.recipes import RECIPES, build
from tests.inference.decoding.test_lossless import requests
from tests.inference.kernels.planted import run_in_its_place
from tests.models import plain_texts, random_target

TOKENS_ALONE = ("distilled", "pard", "ngram", "suffix")
CLOSE = {"from_target_layers": (0, 1, 2)}
"""A small model with all layers of the target: right as often as it is shaken little."""


def close_drafter(target: TargetModel, shaken: float = 0.004) -> Any:
    """Right in most drafts and wrong in some."""
    return build("distilled", target, shaken=shaken, changes=CLOSE)


def outcome(found: dict[int, Completion]) -> dict[int, Any]:
    """Tokens and passes: equal only if every single draft was."""
    return {index: (item.tokens, item.finish, item.passes) for index, item in found.items()}


def run(engine: Engine, items: list[Request]) -> dict[int, Completion]:
    return {item.request.index: item for item in engine.run(items)}


def both(
    target: TargetModel, drafter: Any, config: DecodeConfig, items: list[Request]
) -> tuple[dict[int, Any], dict[int, Any], Engine]:
    """What is decoded with drafting afterwards and ahead, and the engine of the latter."""
    afterwards = Engine(target, drafter, config, details=True)
    alone = outcome(run(afterwards, items))
    if hasattr(drafter, "forget"):
        drafter.forget()
    engine = Engine(target, drafter, replace(config, ahead=True), details=True)
    return alone, outcome(run(engine, items)), engine


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("rows", [1, 4])
def test_text_and_drafts_are_those_of_drafting_afterwards(rows: int, temperature: float) -> None:
    target, items = random_target(), requests(5, new=30)
    config = DecodeConfig(depth=3, batch_size=rows, temperature=temperature)
    alone, found, engine = both(target, close_drafter(target), config, items)
    assert found == alone
    plain = plain_texts(items, temperature=temperature)
    assert {index: tokens for index, (tokens, *_) in found.items()} == plain
    tally = engine.clock.ahead
    assert 0 < tally.kept < tally.drafts


@pytest.mark.parametrize("rule", ["rejection", "block", "specinfer"])
def test_rules_that_weigh_drafts_see_the_same_drafts(rule: str) -> None:
    """With noise keyed by the pass: what is drafted ahead must be keyed by the pass it is for."""
    target, items = random_target(), requests(4, new=40)
    config = DecodeConfig(depth=2, temperature=0.7, rule=rule)
    alone, found, engine = both(target, close_drafter(target), config, items)
    assert found == alone
    assert 0 < engine.clock.ahead.kept < engine.clock.ahead.drafts


@pytest.mark.parametrize("recipe", [*TOKENS_ALONE, "cascade"])
def test_every_kind_that_drafts_from_tokens_alone_can(recipe: str, tmp_path: Path) -> None:
    target, items = random_target(), requests(4, new=30)
    save_drafter(close_drafter(target), tmp_path, target.info)
    parts = ({"kind": "ngram"}, {"checkpoint": str(tmp_path)})
    changes = {"parts": parts} if recipe == "cascade" else {}
    drafter = build(recipe, target, changes=changes)
    engine = Engine(target, drafter, DecodeConfig(depth=3, batch_size=2, ahead=True))
    found = {index: item.tokens for index, item in run(engine, items).items()}
    assert found == plain_texts(items)
    assert engine.clock.ahead.drafts > 0


def test_lookups_are_kept_and_draft_the_same() -> None:
    """A target that repeats itself: lookups are often right."""
    target = random_target()
    items = [replace(item, tokens=item.tokens * 4) for item in requests(3, new=40)]
    for recipe in ("ngram", "suffix"):
        config = DecodeConfig(depth=2)
        alone, found, engine = both(target, build(recipe, target), config, items)
        assert found == alone
        assert 0 < engine.clock.ahead.kept < engine.clock.ahead.drafts


@pytest.mark.parametrize("new", [2, 3, 4, 5, 9])
def test_budgets_end_answers_in_the_middle_of_what_was_assumed(new: int) -> None:
    target, items = random_target(), requests(5, new=new)
    config = DecodeConfig(depth=4, batch_size=2)
    alone, found, _ = both(target, close_drafter(target), config, items)
    assert found == alone
    assert {i: tokens for i, (tokens, *_) in found.items()} == plain_texts(items)


def test_an_end_of_text_within_a_draft_ends_the_row() -> None:
    """The token that an answer holds in its middle ends it; other rows go on."""
    target = random_target()
    items = requests(5, new=30)
    plain = plain_texts(items)
    end = plain[0][len(plain[0]) // 2]
    target.eos_token_ids = (end,)
    config = DecodeConfig(depth=4, batch_size=3)
    alone, found, _ = both(target, close_drafter(target), config, items)
    assert found == alone
    assert found[0][1] == "stop" and len(found[0][0]) < len(plain[0])


def test_a_refused_assumption_leaves_the_state_of_drafting_afterwards() -> None:
    """All of the state, caches up to the root included, and not only what is drafted from it."""
    target, items = random_target(), requests(1, new=40)
    states: dict[bool, list[list[Tensor]]] = {}
    for made_ahead in (False, True):
        config = DecodeConfig(depth=3, ahead=made_ahead)
        engine, seen = (
            Engine(target, close_drafter(target), config),
            states.setdefault(made_ahead, []),
        )
        steps = engine.run(items, yield_steps=True)
        for _ in steps:
            lanes = engine._kept.lanes
            assert lanes is not None
            seen.append([part.clone() for part in committed_parts(lanes.state)])
        if made_ahead:
            assert engine.clock.ahead.kept < engine.clock.ahead.drafts - 1
    assert len(states[True]) == len(states[False])
    for one, other in zip(states[True], states[False], strict=True):
        for left, right in zip(one, other, strict=True):
            assert torch.equal(left, right)


def committed_parts(state: Any) -> Iterator[Tensor]:
    """What a small model's state holds up to the root."""
    yield from state_tensors(state)
    for cache in (*state.keys, *state.values):
        yield cache[0, : int(state.root_position[0]) + 1]


def test_a_draft_that_was_kept_wrongly_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: the accepted length is compared and the bonus is not."""

    def careless(self: Foreseen, accepted: TargetStates) -> bool:
        return bool((accepted.valid == self.run.valid).all())

    target, items = random_target(), requests(3, new=40)
    config = DecodeConfig(depth=1, temperature=1.0)
    drafter = close_drafter(target, shaken=0.02)
    alone, found, _ = both(target, drafter, config, items)
    assert found == alone
    monkeypatch.setattr(Foreseen, "is_true", careless)
    alone, found, _ = both(target, drafter, config, items)
    assert found != alone


def test_a_session_that_is_cancelled_and_refilled_gives_the_same_texts() -> None:
    target = random_target()
    drafter = close_drafter(target)
    items = [
        replace(item, sampling=SamplingSettings(temperature=0.8 * (item.index % 2)))
        for item in requests(5, new=30)
    ]
    texts = []
    for made_ahead in (False, True):
        config = DecodeConfig(depth=3, batch_size=3, ahead=made_ahead)
        found: dict[int, Any] = {}
        with Session(Engine(target, drafter, config), capacity=80) as session:
            for item in items[:4]:
                session.add(item)
            for step in range(200):
                if step == 3:
                    session.cancel(1)
                if step == 5:
                    session.add(items[4])
                for done in session.step():
                    found[done.request.index] = (done.finish, done.tokens, done.passes)
        texts.append(found)
    assert texts[0] == texts[1]
    assert texts[0][1][0] == "cancelled" and len(texts[0]) == 5


def test_a_run_that_is_left_in_the_middle_leaves_nothing_under_way() -> None:
    target, items = random_target(), requests(3, new=40)
    drafter = close_drafter(target)
    config = DecodeConfig(depth=3, batch_size=2, ahead=True)
    engine = Engine(target, drafter, config)
    steps = engine.run(items, yield_steps=True)
    for _ in range(4):
        next(steps)
    steps.close()
    assert outcome(run(engine, items)) == outcome(
        run(Engine(target, drafter, replace(config, ahead=False)), items)
    )


def test_a_verification_that_fails_gives_the_state_back(monkeypatch: pytest.MonkeyPatch) -> None:
    target, items = random_target(), requests(2, new=40)
    drafter = build("suffix", target)
    engine = Engine(target, drafter, DecodeConfig(depth=3, batch_size=2, ahead=True))
    steps = engine.run(items, yield_steps=True)
    for _ in range(4):
        next(steps)
    lanes = engine._kept.lanes
    assert lanes is not None
    before = [part.clone() for part in state_tensors(lanes.state)]

    def fail(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(target, "verify", fail)
        with pytest.raises(KeyboardInterrupt):
            list(steps)
    after = state_tensors(lanes.state)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_it_runs_in_a_thread_of_its_own_with_threads_of_its_own() -> None:
    target, items = random_target(), requests(1, new=12)
    drafter = close_drafter(target)
    seen: set[tuple[bool, int]] = set()
    main, plain = threading.get_ident(), drafter.propose

    def propose(state: Any, noise: Any) -> Proposal:
        seen.add((threading.get_ident() == main, torch.get_num_threads()))
        return plain(state, noise)

    drafter.propose = propose
    own = torch.get_num_threads()
    config = DecodeConfig(depth=2, ahead=True, ahead_threads=own + 1)
    run(Engine(target, drafter, config), items)
    assert (False, own + 1) in seen and {count for here, count in seen if here} == {own}
    assert torch.get_num_threads() == own


@pytest.mark.parametrize("recipe", ["distilled", "pard"])
def test_the_attention_kernel_drafts_ahead_too(
    recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts made ahead and afterwards attend alike, or kept ones would round differently."""
    calls: set[tuple[bool, str]] = set()
    main, draft = threading.get_ident(), AheadDrafter._draft

    def noted(by: str, call: Any) -> Any:
        def run_and_note(*given: Any, **more: Any) -> Any:
            calls.add((threading.get_ident() == main, by))
            return call(*given, **more)

        return run_and_note

    run_in_its_place(monkeypatch, noted("kernel", TREE_ATTENTION.reference))
    monkeypatch.setattr(sight, "cache_attention", noted("mask", sight.cache_attention))
    monkeypatch.setattr(AheadDrafter, "_draft", noted("draft", draft))
    target = random_target(dtype=torch.float32)
    engine = Engine(target, build(recipe, target), DecodeConfig(depth=3, ahead=True))
    run(engine, requests(1, new=8))
    assert {by for here, by in calls if not here} == {"draft", "kernel"}


def test_a_placed_drafter_drafts_ahead_too() -> None:
    target, items = random_target(), requests(3, new=24)
    cpu = torch.device("cpu")
    for settings in ({}, {"temperature": 1.0, "rule": "rejection"}):
        config = DecodeConfig(depth=3, batch_size=2, **settings)  # type: ignore[arg-type]
        placed = PlacedDrafter(close_drafter(target), cpu, cpu)
        alone, found, engine = both(target, placed, config, items)
        assert found == alone and engine.clock.ahead.kept > 0


def test_hidden_time_is_no_phase_and_at_most_what_was_drafted() -> None:
    target, items = random_target(), requests(2, new=40)
    engine = Engine(target, close_drafter(target, 0.0), DecodeConfig(depth=3, ahead=True))
    run(engine, items)
    tally = engine.clock.ahead
    assert tally.kept >= tally.drafts - 2 * len(items)
    assert 0 < tally.hidden <= engine.clock.seconds["verify"] + engine.clock.seconds["other"]
    engine.clock.reset()
    assert engine.clock.ahead.drafts == 0


@pytest.mark.parametrize("recipe", [name for name in RECIPES if name not in TOKENS_ALONE])
def test_kinds_that_need_the_verified_states_are_refused_by_name(recipe: str) -> None:
    target = random_target()
    drafter = build(recipe, target)
    with pytest.raises(UserError, match=f"tokens alone, but '{drafter.kind}'"):
        Engine(target, drafter, DecodeConfig(ahead=True))


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"shape": "dynamic"}, "shape=dynamic"),
        ({"shape": "tree", "choices": ((0,),)}, "shape=tree"),
        ({"shape": "none"}, "shape=none"),
        ({"adaptive": "entropy"}, "adaptive=entropy"),
        ({"adaptive_lengths": (2, 4)}, r"adaptive_lengths=\[2, 4\]"),
        ({"compile": True}, "decode.compile"),
    ],
)
def test_settings_that_cannot_are_refused(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError, match=named):
        DecodeConfig(ahead=True, **settings)


def test_plain_decoding_and_other_drafts_do_without() -> None:
    """What measurements and tuning derive from settings with decode.ahead stays valid."""
    config = DecodeConfig(ahead=True, depth=3)
    assert not config.without_draft().ahead
    assert Draft("chain", 5).on(config).ahead
    assert not Draft("dynamic", 3, nodes=8, width=3).on(config).ahead
    assert not Draft("none").on(config).ahead


def test_a_snapshot_puts_back_what_rows_share() -> None:
    target = random_target()
    drafter = build("suffix", target)
    tokens = torch.tensor([[3, 4, 5, 6]])
    places = torch.arange(4)[None]
    run_of = TargetStates(tokens, tokens + 1, places, places >= 0)
    state = drafter.start(run_of, DecodeConfig(depth=3).tree(), 40)
    before = state.archive.tokens.clone()
    saved = Snapshot(state)
    drafter.commit(state, replace(run_of, positions=places + 4))
    assert not torch.equal(state.archive.tokens, before)
    saved.restore()
    assert torch.equal(state.archive.tokens, before)
