"""Changing the drafter of a session, and two drafters in one batch: the text stays plain
decoding's."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from heads.api.drafter import Proposal, TargetStates
from heads.api.errors import UserError
from heads.api.features import FeatureSpec
from heads.api.tree import TokenTree
from inference.decoding.config import DecodeConfig
from inference.decoding.engine import Engine
from inference.decoding.pair import DrafterPair, require_alike
from inference.decoding.requests import Completion, Request
from inference.decoding.session import Session
from tests.heads.recipes import RECIPES
from tests.inference.decoding.test_lossless import SHAPES
from tests.inference.decoding.test_lossless_kinds import drafter_of
from tests.inference.decoding.test_session import alone, mixed
from tests.models import random_target

Act = Callable[[Session], list[Completion]]
TREES = {**SHAPES, "dynamic": {"shape": "dynamic", "nodes": 7, "depth": 3, "width": 3}}


@cache
def plain() -> dict[int, list[int]]:
    return {item.index: alone(item) for item in mixed()}


def session_of(kind: str, shape: str = "chain", **more: Any) -> Session:
    target = random_target()
    decode = DecodeConfig(batch_size=4, **TREES[shape], **more)  # type: ignore[arg-type]
    return Session(Engine(target, drafter_of(kind, target), decode), 60)


def served(
    session: Session, acts: dict[int, Act], every: int = 2
) -> tuple[dict[int, list[int]], list[Completion]]:
    """Add a request every few steps, and do `acts` before the steps they are given for: the texts,
    and all completions."""
    waiting, ended, step = mixed(), [], 0
    with session:
        while waiting or session.unfinished:
            if waiting and step % every == 0:
                session.add(waiting.pop(0))
            if step in acts:
                ended += acts[step](session)
            ended += session.step()
            step += 1
    assert step > max(acts, default=0), "some change came after the end"
    return {one.request.index: one.tokens for one in ended}, ended


def change(kind: str) -> Act:
    return lambda session: session.change_drafter(drafter_of(kind, random_target()))


def pair(kind: str, choose: Callable[[Request], bool] = lambda request: True) -> Act:
    return lambda session: session.pair_with(drafter_of(kind, random_target()), choose)


def settle(second: bool) -> Act:
    return lambda session: session.settle(second)


def odd(request: Request) -> bool:
    return request.index % 2 == 1


@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize("shape", TREES)
def test_changing_the_drafter_changes_no_token(shape: str, lag: int) -> None:
    kinds = "ngram", "eagle3", "distilled", "medusa", "eagle3", "ngram"
    acts = {3 + 3 * place: change(kind) for place, kind in enumerate(kinds)}
    texts, _ = served(session_of("eagle3", shape, lag=lag), acts)
    assert texts == plain()


@pytest.mark.rotated
@pytest.mark.parametrize("name", RECIPES)
def test_every_kind_drafts_beside_another_takes_over_and_is_taken_over_from(name: str) -> None:
    acts = {2: pair(name, odd), 8: settle(True), 12: change("ngram"), 15: change(name)}
    assert served(session_of("eagle3"), acts)[0] == plain()


@pytest.mark.rotated
@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize("second", [False, True])
@pytest.mark.parametrize(
    "kinds", [("eagle3", "medusa"), ("ngram", "eagle3"), ("eagle3", "distilled")]
)
def test_two_drafters_in_one_batch_change_no_token(
    kinds: tuple[str, str], second: bool, lag: int
) -> None:
    acts = {3: pair(kinds[1], odd), 16: settle(second)}
    texts, ended = served(session_of(kinds[0], lag=lag), acts)
    assert texts == plain()
    # those that began and ended with both there tell who drafted
    assert {one.arm for one in ended} > {None}
    assert all(one.arm in (None, int(odd(one.request))) for one in ended)


@pytest.mark.parametrize(
    ("shape", "other"), [("tree", "ngram"), ("tree", "medusa"), ("dynamic", "medusa")]
)
def test_trees_of_two_drafters_are_verified_together(shape: str, other: str) -> None:
    texts, ended = served(session_of("eagle3", shape), {2: pair(other, odd)})
    assert texts == plain()
    assert {one.arm for one in ended} == {None, 0, 1}


def test_a_pair_accepts_what_each_part_accepts_alone() -> None:
    """A row beside others of another drafter drafts what it would draft in a batch of its own."""
    target, items = random_target(), mixed(8)
    decode = DecodeConfig(batch_size=4, depth=3)
    passes = {}
    for kind in ("eagle3", "ngram"):
        with Session(Engine(target, drafter_of(kind, target), decode), 60) as session:
            for item in items:
                session.add(item)
            while session.unfinished:
                passes |= {(kind, c.request.index): c.passes for c in session.step()}
    with Session(Engine(target, drafter_of("eagle3", target), decode), 60) as session:
        session.pair_with(drafter_of("ngram", target), odd)
        for item in items:
            session.add(item)
        while session.unfinished:
            for one in session.step():
                kind = "ngram" if odd(one.request) else "eagle3"
                assert one.passes == passes[kind, one.request.index]


def test_a_row_that_changes_hands_goes_on_with_the_drafts_of_the_new_one() -> None:
    """The state that is made anew is the one that drafting from the start would have led to."""
    target, (item,) = random_target(), [one for one in mixed() if one.index == 3]
    decode = DecodeConfig(batch_size=4, depth=3)

    def passes(first: str, acts: dict[int, Act]) -> list[Any]:
        with Session(Engine(target, drafter_of(first, target), decode), 60) as session:
            session.add(item)
            found, step = [], 0
            while session.unfinished:
                if step in acts:
                    acts[step](session)
                found += session.step()
                step += 1
        return found[0].passes

    whole = passes("distilled", {})
    changed = passes("ngram", {4: change("distilled")})
    at, where = 0, {}
    for record in whole:
        where[at] = record
        at += record.committed
    at, met = 0, 0
    for step, record in enumerate(changed):
        if step > 3 and at in where:
            assert record == where[at]
            met += 1
        at += record.committed
    assert met


@pytest.mark.parametrize("more", [{"adaptive": "confidence"}, {"ahead": True}])
def test_modes_of_one_drafter_take_another_but_no_pair(more: dict[str, Any]) -> None:
    kind = "distilled" if "ahead" in more else "eagle3"
    acts = {3: change("ngram"), 8: change(kind)}
    assert served(session_of(kind, **more), acts)[0] == plain()
    with session_of(kind, **more) as session, pytest.raises(UserError, match="side by side"):
        session.pair_with(drafter_of("ngram", random_target()))


def test_what_cannot_draft_leaves_the_drafter_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(act: Act, words: str) -> Act:
        def check(session: Session) -> list[Completion]:
            with pytest.raises(UserError, match=words):
                act(session)
            return []

        return check

    acts = {3: refused(change("eagle3"), "tokens alone"), 5: refused(pair("ngram"), "side by side")}
    assert served(session_of("distilled", ahead=True), acts)[0] == plain()

    def broken(self: Any, row: int, text: Any) -> None:
        raise UserError("no room")

    monkeypatch.setattr("inference.decoding.buffers.Lanes._rebuild", broken)
    assert served(session_of("eagle3"), {4: refused(change("medusa"), "no room")})[0] == plain()
    session = session_of("eagle3")
    with session, pytest.raises(UserError, match="nothing is drafted here"):
        Session(Engine(random_target(), None), 60).check_drafter(session.engine.drafter)


def test_drafts_that_cannot_be_verified_together_are_refused() -> None:
    ids = torch.zeros(1, 4, dtype=torch.int64)
    chain, tree = TokenTree.chain(3), TokenTree.from_choices([[0], [1], [0, 0]])
    weighed = Proposal(ids, tree, logits=torch.zeros(1, 4, 5))
    with pytest.raises(UserError, match="different shapes"):
        require_alike(Proposal(ids, chain), Proposal(ids, tree), False)
    with pytest.raises(UserError, match="one has probabilities"):
        require_alike(Proposal(ids, tree), weighed, True)
    require_alike(Proposal(ids, tree), weighed, False)


def test_a_row_is_verified_in_the_tree_of_its_own_drafter() -> None:
    """Of two static trees with as many nodes and levels: a cascade joins others than it is asked
    for."""
    first, second = (
        Proposal(torch.arange(4)[None] + base, TokenTree.from_choices(choices))
        for base, choices in ((0, [[0], [1], [0, 0]]), (10, [[0], [1], [1, 0]]))
    )
    require_alike(first, second, False)
    pair = DrafterPair(*([drafter_of("ngram", random_target())] * 2), 20, odd)
    for rows in ([True], [False, True]):
        found = pair._select(first, second, torch.tensor(rows), False)
        assert found.tokens[-1].tolist() == second.tokens[0].tolist()
        assert found.tree.parents[-1].tolist() == second.tree.parents[0].tolist()
        assert torch.equal(found.tree.ancestors[-1], second.tree.ancestors[0])
    assert found.tree.parents[0].tolist() == first.tree.parents[0].tolist()


def test_a_pair_reads_what_both_read_and_gives_each_its_own() -> None:
    target = random_target()
    seen: list[Any] = []

    class Looking:
        """Drafts as n-gram lookup does, and notes the taps that it is given."""

        kind, capturable = "looking", True

        def __init__(self, *taps: int) -> None:
            self.needs, self.inner = FeatureSpec(taps), drafter_of("ngram", target)

        def start(self, states: Any, tree: Any, capacity: int) -> Any:
            seen.append((self.needs.taps, states.taps))
            return self.inner.start(states, tree, capacity)

        def propose(self, state: Any, noise: Any) -> Any:
            return self.inner.propose(state, noise)

        def commit(self, state: Any, accepted: Any) -> Any:
            return self.inner.commit(state, accepted)

    found = DrafterPair(Looking(2), Looking(1, 3), target.info.vocab_size, odd)  # type: ignore[arg-type]
    assert found.needs == FeatureSpec((1, 2, 3))
    ids, taps = torch.zeros(1, 2, dtype=torch.int64), torch.randn(1, 2, 3, 4)
    found.start(TargetStates(ids, ids, ids, ids == 0, taps), TokenTree.chain(3), 20)
    (one, first), (other, second) = seen
    assert one == (2,) and torch.equal(first, taps[:, :, 1:2])
    assert other == (1, 3) and torch.equal(second, taps[:, :, ::2])
