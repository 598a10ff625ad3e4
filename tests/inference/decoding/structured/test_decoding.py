"""Structured output: every answer follows its constraint, and is the one of plain decoding with the
same constraint, whatever drafts, in which shape, beside whom."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from heads.jump_forward import Config as JumpForward
from heads.jump_forward import Drafter as JumpForwardDrafter
from inference.decoding.config import DecodeConfig
from inference.decoding.engine import Engine
from inference.decoding.execution import compiled
from inference.decoding.requests import DEAD_END, Completion, Request
from inference.decoding.session import Session
from inference.decoding.structured.constraint import Constraint
from inference.decoding.structured.matcher import DeadEndError, Matcher
from tests.fakes import AlwaysWrong, RandomTrees, SometimesRight
from tests.heads.recipes import build
from tests.inference.decoding.slow_device import SlowDevice, decoding_on
from tests.inference.decoding.structured.parts import (
    CONSTRAINTS,
    END,
    asked,
    structured_target,
    text_of,
)
from tests.inference.decoding.test_no_sync import ALL_SHAPES
from tests.models import texts_of

MIXED = ["schema", None, "regex", "grammar", None, "choice", "loose schema"]


def decode(drafter: Any, config: DecodeConfig, items: list[Request]) -> dict[int, Completion]:
    engine = Engine(structured_target(), drafter, config)
    return {done.request.index: done for done in engine.run(items)}


def tokens(found: dict[int, Completion]) -> dict[int, list[int]]:
    return {index: done.tokens for index, done in found.items()}


def plain(items: list[Request], temperature: float = 0.0) -> dict[int, list[int]]:
    """Plain decoding, one request at a time."""
    return dict(_plain(tuple(items), temperature))


@cache
def _plain(items: tuple[Request, ...], temperature: float) -> dict[int, list[int]]:
    return tokens(decode(None, DecodeConfig(shape="none", temperature=temperature), list(items)))


@pytest.mark.parametrize("name", CONSTRAINTS)
def test_every_answer_follows_its_constraint(name: str) -> None:
    items = [replace(asked([name], new=60)[0], index=seed, seed=seed + 1) for seed in range(16)]
    config = DecodeConfig(temperature=1.0, batch_size=16, depth=3)
    found = decode(build("medusa", structured_target()), config, items)
    texts = []
    for done in found.values():
        if done.finish == "stop":
            assert done.tokens[-1] == END
            texts.append(text_of(done.tokens))
            assert CONSTRAINTS[name][1](texts[-1]), texts[-1]
    # a random model goes on with spaces where it may
    assert len(set(texts)) > 2 or name == "loose schema"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("shape", ALL_SHAPES)
def test_the_text_is_that_of_plain_decoding(shape: str, temperature: float) -> None:
    items = asked(MIXED, new=24)
    expected = plain(items, temperature=temperature)
    config = DecodeConfig(temperature=temperature, batch_size=4, **ALL_SHAPES[shape])
    whole = {item.tokens: [*item.tokens, *expected[item.index]] for item in items}
    target = structured_target()
    fakes = [RandomTrees] if shape == "dynamic" else [AlwaysWrong, SometimesRight]
    drafters: list[Any] = [fake(whole, 4096) for fake in fakes]
    drafters += [build("eagle3", target), JumpForwardDrafter(JumpForward(), target.info)]
    accepted = 0
    for drafter in drafters:
        found = decode(drafter, config, items)
        assert tokens(found) == expected, drafter.kind
        accepted += sum(record.accepted for done in found.values() for record in done.passes)
    assert accepted > 20


@pytest.mark.parametrize(
    ("rule", "shape"),
    [
        ("rejection", "chain"),
        ("block", "chain"),
        ("specinfer", "tree"),
        ("specinfer", "dynamic"),
        ("traversal", "tree"),
        ("typical", "tree"),
    ],
)
def test_every_rule_keeps_to_the_grammar(rule: str, shape: str) -> None:
    """Greedy: the text of plain decoding. Sampled: another text, which follows the grammar."""
    items = asked(MIXED, new=30)
    drafter = build("medusa", structured_target())
    shaped = ALL_SHAPES[shape]
    greedy = decode(drafter, DecodeConfig(rule=rule, batch_size=4, **shaped), items)
    assert tokens(greedy) == plain(items)
    config = DecodeConfig(rule=rule, temperature=1.0, batch_size=4, **shaped)
    found = decode(drafter, config, items)
    checked = 0
    for place, name in enumerate(MIXED):
        if name is not None and found[place].finish == "stop":
            assert CONSTRAINTS[name][1](text_of(found[place].tokens))
            checked += 1
    assert checked >= 3


@pytest.mark.parametrize(
    ("rule", "shape"),
    [("rejection", "chain"), ("block", "chain"), ("specinfer", "tree"), ("traversal", "tree")],
)
def test_a_rule_keeps_the_constrained_distribution(rule: str, shape: str) -> None:
    """The frequencies of all answers of a small grammar, against plain decoding's."""
    count = 400
    letters = Constraint("regex", "[ab][cd]")
    items = [Request(seed, (50, 60, 70), seed + 1, 8, constraint=letters) for seed in range(count)]
    drafter = build("medusa", structured_target(), shaken=0.3)
    ways = []
    for head, config in (
        (None, DecodeConfig(shape="none", temperature=1.0, batch_size=64)),
        (drafter, DecodeConfig(rule=rule, temperature=1.0, batch_size=64, **ALL_SHAPES[shape])),
    ):
        found = decode(head, config, items)
        ways.append(Counter(text_of(done.tokens) for done in found.values()))
    expected, got = ways
    assert sum(got.values()) == count and set(got) <= {"ac", "ad", "bc", "bd"}
    for text in expected | got:
        share = (expected[text] + got[text]) / (2 * count)
        error = (2 * share * (1 - share) / count) ** 0.5
        assert abs(expected[text] - got[text]) / count < 4.5 * error


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_free_rows_beside_constrained_ones_are_as_if_alone(temperature: float) -> None:
    """Passes as well: the same drafts were kept."""
    config = DecodeConfig(temperature=temperature, batch_size=3, **ALL_SHAPES["tree"])
    drafter = build("eagle3", structured_target())
    mixed = decode(drafter, config, asked([None, "schema", None, "grammar", None]))
    free = decode(drafter, config, asked([None] * 5))
    for place in (0, 2, 4):
        assert mixed[place].tokens == free[place].tokens
        assert mixed[place].passes == free[place].passes
    assert mixed[1].tokens != free[1].tokens


def test_an_answer_that_has_no_room_is_cut() -> None:
    whole = plain(asked(["schema", "loose schema"], new=40))
    items = asked(["schema", "loose schema"], new=7)
    config = DecodeConfig(batch_size=2, depth=4)
    found = decode(build("medusa", structured_target()), config, items)
    for place, done in found.items():
        assert done.finish == "length" and done.tokens == whole[place][:7]


def test_a_place_that_is_not_taken_back_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: grammars that stay where a refused draft led them give another text, or end at a
    token that they do not know."""
    items = asked([*MIXED, "schema", "choice"])
    expected = plain(items)
    whole = {item.tokens: [*item.tokens, *expected[item.index]] for item in items}
    visit = Matcher._visit

    def forgetful(self: Matcher, *given: Any) -> None:
        grammar, self._grammar = self._grammar, _WithoutRollback(self._grammar)
        try:
            visit(self, *given)
        finally:
            self._grammar = grammar

    monkeypatch.setattr(Matcher, "_visit", forgetful)
    with pytest.raises(Exception, match="does not allow"):
        decode(SometimesRight(whole, 4096), DecodeConfig(depth=3), items)


class _WithoutRollback:
    def __init__(self, grammar: Any) -> None:
        self.grammar = getattr(grammar, "grammar", grammar)

    def rollback(self, count: int) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return getattr(self.grammar, name)


# Other ways to run steps


def test_constrained_rows_on_a_device_that_the_host_runs_ahead_of() -> None:
    """They wait for their results; steps of free rows are captured as ever."""
    items = asked([*MIXED, None, None], new=24)
    config = DecodeConfig(depth=3, batch_size=2, lag=2)
    engine = Engine(structured_target(), build("medusa", structured_target()), config)
    device = SlowDevice()
    with decoding_on(device, engine, 0.0):
        found = texts_of(engine, items)
    assert found == plain(items)


@pytest.mark.parametrize("shape", ["chain", "dynamic"])
def test_traced_steps_read_the_masks(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps as compiled ones are run, traced once and in three parts, but without a compiler."""
    monkeypatch.setattr(compiled, "compile_graph", lambda graph, arguments: graph)
    _decodes_compiled(shape)


@pytest.mark.slow
def test_compiled_steps_read_the_masks() -> None:
    _decodes_compiled("chain")


def _decodes_compiled(shape: str) -> None:
    items = asked(["schema", None, "regex", None], new=16)
    target = structured_target()
    config = DecodeConfig(temperature=1.0, batch_size=2, compile=True, **ALL_SHAPES[shape])
    drafter = JumpForwardDrafter(JumpForward(), target.info)
    if shape == "dynamic":
        drafter = build("eagle3", target)
    engine = Engine(target, drafter, config, capacity=96)
    found = texts_of(engine, items)
    assert engine._kept.lanes is not None
    steps = engine._kept.lanes.runner.compiled
    assert steps is not None and len(steps._plans) == 2  # with a grammar, and without
    assert found == plain(items, temperature=1.0)


def test_a_session_moves_rows_with_their_grammars() -> None:
    names = [*MIXED, None, "schema", "regex", None, "choice", "grammar"]
    items = [
        replace(item, max_new_tokens=4 + 9 * item.index % 25) for item in asked(list(names), new=30)
    ]
    config = DecodeConfig(batch_size=3, depth=3, temperature=1.0)
    expected = plain(items, temperature=1.0)
    engine = Engine(structured_target(), build("medusa", structured_target()), config)
    waiting, found, steps = list(items), {}, 0
    with Session(engine, capacity=96) as session, torch.no_grad():
        while waiting or session.unfinished:
            if waiting and steps % 3 == 0:
                session.add(waiting.pop(0))
            found |= {done.request.index: done.tokens for done in session.step()}
            steps += 1
        assert not session.lanes.grammars.active
        session.add(replace(items[0], index=99))
        session.step()
        session.cancel(99)
        session.step()
        assert not session.lanes.grammars.active
    assert found == expected


def test_a_dead_end_ends_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    items = asked(["schema", "regex", None], new=20)
    expected = plain(items, temperature=1.0)
    accept, doomed = Matcher.accept, list[Matcher]()

    def dead(self: Matcher, tokens: Sequence[int]) -> None:
        if self in doomed:
            raise DeadEndError("nothing is allowed")
        if not doomed:
            doomed.append(self)
        accept(self, tokens)

    monkeypatch.setattr(Matcher, "accept", dead)
    config = DecodeConfig(batch_size=3, depth=3, temperature=1.0)
    engine = Engine(structured_target(), build("medusa", structured_target()), config)
    found = {}
    with Session(engine, capacity=96) as session, torch.no_grad():
        for item in items:
            session.add(item)
        while session.unfinished:
            found |= {done.request.index: done for done in session.step()}
    ends = [found[item.index].finish for item in items]
    assert ends.count(DEAD_END) == 1 and ends[2] != DEAD_END
    for item, end in zip(items, ends, strict=True):
        if end != DEAD_END:
            assert found[item.index].tokens == expected[item.index]


def test_the_engines_structure_is_that_of_requests_without_one(tmp_path: Any) -> None:
    path = tmp_path / "answer.regex"
    path.write_text("(red|green) [0-9]\n")
    config = DecodeConfig(structure=str(path), temperature=1.0, max_new_tokens=20, depth=2)
    engine = Engine(structured_target(), None, replace(config, shape="none"))
    for answer in engine.generate([[40, 41], [50, 51]]):
        assert answer.text[:-1] in ("red ", "green ") and answer.text[-1].isdigit()
    own = asked(["choice"])[0]
    (done,) = engine.run([own])
    assert CONSTRAINTS["choice"][1](text_of(done.tokens))
