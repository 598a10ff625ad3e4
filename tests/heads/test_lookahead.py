"""Lookahead decoding against a slow one with lists and a dict; its tree; how it fits into the
shapes asked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from heads.api.drafter import Proposal, TargetStates, Verified
from heads.api.errors import UserError
from heads.api.state import write_rows
from heads.api.tree import DraftShape, DynamicShape, TokenTree
from heads.lookahead import Config, Drafter, lay_out
from heads.nn.lookup.history import _SPREAD
from heads.nn.lookup.pool import NgramPool
from inference.decoding.rules.accept import walk
from tests.heads.micro import PlainNoise, micro_target
from tests.heads.test_ngram import run

CPU = torch.device("cpu")
WIDE = DynamicShape(31, 7, 8)
TREE = TokenTree.from_choices([[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]])


def new(**settings: Any) -> Drafter:
    return Drafter(Config(**settings), micro_target().info)


# The tree


def test_a_window_node_sees_level_0_up_to_its_column_and_its_own_column() -> None:
    layout = lay_out(Config(ngram=4, window=3, guesses=2), WIDE, CPU)
    tree, columns, levels = layout.tree, 3, 3
    assert tree.num_nodes == 1 + (3 + 2) * 3 and tree.max_depth == 3 + 4 - 2
    for level in range(levels):
        for column in range(columns):
            node = 1 + level * columns + column
            seen = {
                0,
                *range(1, 2 + column),
                *(1 + above * columns + column for above in range(level + 1)),
            }
            assert set(tree.ancestors[0, node].nonzero()[:, 0].tolist()) == seen
            assert tree.depth[0, node] == column + 1 + level
    for gram in range(2):
        begin = 1 + levels * columns + gram * levels
        assert tree.parents[0, begin : begin + levels].tolist() == [0, begin, begin + 1]


@pytest.mark.parametrize(
    ("shape", "settings", "columns", "guesses"),
    [
        (WIDE, {}, 5, 5),
        (WIDE, {"ngram": 2}, 7, 23),  # the depth allows 7
        (WIDE, {"ngram": 5}, 4, 3),
        (WIDE, {"window": 2}, 2, 8),
        (WIDE, {"guesses": 8}, 2, 8),
        (WIDE, {"window": 2, "guesses": 3}, 2, 3),
        (TREE, {}, 1, 1),
        (TREE, {"ngram": 3}, 2, 1),
        (DynamicShape(9, 3, 3), {"ngram": 3}, 2, 2),
    ],
)
def test_sizes_left_open_take_what_fits(
    shape: DraftShape, settings: dict[str, int], columns: int, guesses: int
) -> None:
    layout = lay_out(Config(**settings), shape, CPU)
    assert (layout.columns, layout.guesses) == (columns, guesses)
    assert layout.tree.num_nodes <= shape.num_nodes and layout.tree.max_depth <= shape.max_depth


# The slow and obvious one


class Slow:
    """One row of lookahead decoding; collected n-grams are a dict from n-gram to the number of the
    write."""

    def __init__(self, config: Config, columns: int, guesses: int, text: list[int]) -> None:
        self.config, self.columns, self.guesses, self.text = config, columns, guesses, list(text)
        self.n, self.levels = config.ngram, config.ngram - 1
        self.pool, self.writes = dict[tuple[int, ...], int](), 0
        self.window = self.drawn()
        if config.from_text:
            self.collect([tuple(text[end - self.n : end]) for end in range(self.n, len(text) + 1)])

    def drawn(self) -> list[list[int]]:
        wanted = len(self.text) * self.levels * self.columns
        places = [
            (wanted + k) * _SPREAD % len(self.text) for k in range(self.levels * self.columns)
        ]
        tokens = [self.text[place] for place in places]
        return [tokens[level * self.columns :][: self.columns] for level in range(self.levels)]

    def collect(self, grams: list[tuple[int, ...]]) -> None:
        for place, gram in enumerate(grams):
            if gram not in grams[place + 1 :]:
                self.pool[gram] = self.writes
                self.writes += 1

    def starting_with(self, token: int) -> list[tuple[int, ...]]:
        known = [
            g
            for g, number in self.pool.items()
            if g[0] == token and self.writes - number <= self.config.pool
        ]
        return sorted(known, key=lambda g: -self.pool[g])

    def proposal(self) -> list[int]:
        root = self.text[-1]
        found = [g[1:] for g in self.starting_with(root)][: self.guesses]
        found += [(root,) * self.levels] * (self.guesses - len(found))
        return [root, *(t for level in self.window for t in level), *(t for g in found for t in g)]

    def chain(self, depth: int) -> list[int]:
        tokens = [self.text[-1]]
        while len(tokens) <= depth:
            found = self.starting_with(tokens[-1])
            tokens += found[0][1:] if found else [tokens[-1]] * self.levels
        return tokens[: depth + 1]

    def commit(self, text: list[int], picks: list[int]) -> None:
        """text: accepted tokens and the bonus; picks: behind every node."""
        last = picks[1 + (self.levels - 1) * self.columns :][: self.columns]
        columns = [tuple(level[i] for level in self.window) for i in range(self.columns)]
        self.collect([(*column, pick) for column, pick in zip(columns, last, strict=True)])
        self.grow(text)
        above, fresh, accepted = [*self.window[1:], last], self.drawn(), len(text) - 1
        for level in range(self.levels):
            moved = above[level][accepted:]
            self.window[level] = moved + fresh[level][len(moved) :]

    def commit_chain(self, drafted: list[int], text: list[int], picks: list[int]) -> None:
        whole = self.text[:-1] + drafted
        found = []
        for node in reversed(range(len(drafted))):
            end = len(self.text) + node
            if end >= self.levels:
                found.append((*whole[end - self.levels : end], picks[node]))
        self.collect(found)
        self.grow(text)

    def grow(self, text: list[int]) -> None:
        before = len(self.text)
        self.text += text
        if self.config.from_text:
            ends = range(max(before + 1, self.n), len(self.text) + 1)
            self.collect([tuple(self.text[end - self.n : end]) for end in ends])


def verify(proposal: Proposal, lengths: list[int], step: int) -> TargetStates:
    """A target whose pick follows from the two tokens before, most of the time; and what is
    committed then."""
    tokens, tree = proposal.tokens, proposal.tree
    parents = tree.parents.expand(tokens.shape[0], -1)
    positions = torch.tensor(lengths)[:, None] - 1 + tree.depth
    odd = (positions * 7 + step) % 5 == 0
    picks = torch.where(odd, positions % 4, (tokens + 2 * tokens.gather(1, parents)) % 4)
    walked = walk(tokens, picks, tree)
    count = walked.accepted + 1
    place = torch.arange(tree.max_depth + 1)
    run_tokens = tokens.gather(1, walked.path)
    following = picks.gather(1, walked.path)
    run_positions = torch.tensor(lengths)[:, None] - 1 + place
    states = TargetStates(run_tokens, following, run_positions, place < count[:, None])
    states.verified = Verified(tokens, picks, tree, walked.path)
    return states


@pytest.mark.parametrize(
    "shape",
    [WIDE, TREE, TokenTree.chain(5), TokenTree.chain(1)],
    ids=["wide", "tree", "chain", "one"],
)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"ngram": 2},
        {"ngram": 3, "from_text": False},
        {"ngram": 3, "pool": 64},
        {"from_text": False},
    ],
    ids=str,
)
def test_lookahead_equals_the_slow_one_in_a_ragged_refilled_batch(
    shape: DraftShape, settings: dict[str, Any]
) -> None:
    drafter = new(**settings)
    layout = lay_out(drafter.config, shape, CPU)
    generator = torch.Generator().manual_seed(3)
    texts = [torch.randint(0, 4, (length,), generator=generator).tolist() for length in (3, 30, 7)]

    def slow(text: list[int]) -> Slow:
        return Slow(drafter.config, layout.columns, layout.guesses, text)

    rows = [slow(text) for text in texts]
    state = drafter.start(run(texts, [0, 0, 0]), shape, capacity=300)
    accepted = 0
    for step in range(40):
        proposal = drafter.propose(state, PlainNoise())
        for row, one in enumerate(rows):
            expected = one.chain(shape.max_depth) if shape.is_chain else one.proposal()
            assert proposal.tokens[row].tolist() == expected, (step, row)
        states = verify(proposal, [len(one.text) for one in rows], step)
        assert states.verified is not None
        state = drafter.commit(state, states)
        for row, one in enumerate(rows):
            length = int(states.lengths[row])
            text, picks = (
                states.next_tokens[row, :length].tolist(),
                states.verified.picks[row].tolist(),
            )
            accepted += length - 1
            if shape.is_chain:
                one.commit_chain(proposal.tokens[row].tolist(), text, picks)
            else:
                one.commit(text, picks)
        if step in (9, 22):
            fresh = torch.randint(0, 4, (4 + step,), generator=generator).tolist()
            rows[step % 3] = slow(fresh)
            write_rows(
                state,
                torch.tensor([step % 3]),
                drafter.start(run([fresh], [0]), shape, capacity=300),
            )
    assert accepted > 10


# The pool


def test_a_pool_keeps_the_newest_and_each_once() -> None:
    pool = NgramPool.empty(2, 4, 2, CPU)
    grams = torch.tensor([[[1, 2], [1, 3], [1, 2]], [[5, 6], [1, 7], [5, 8]]])
    pool.add(grams, torch.tensor([[True, True, True], [True, False, True]]))
    found, known = pool.starting_with(torch.tensor([1, 5]), 3)
    assert found[0, :2].tolist() == [[2], [3]] and found[1, :2].tolist() == [[8], [6]]
    assert known.tolist() == [[True, True, False]] * 2
    pool.add(torch.tensor([[[1, 3], [2, 9]], [[1, 1], [1, 2]]]), torch.ones(2, 2, dtype=torch.bool))
    assert pool.starting_with(torch.tensor([1, 5]), 3)[0][0, :2].tolist() == [[3], [2]]
    # a fifth write into the ring of four: the oldest is gone, which was (5, 6) here and an outdated
    # (1, 3) there
    pool.add(torch.tensor([[[4, 4]], [[4, 4]]]), torch.ones(2, 1, dtype=torch.bool))
    found, known = pool.starting_with(torch.tensor([1, 5]), 3)
    assert known.tolist() == [[True, True, False], [True, False, False]]
    assert found[0, :2].tolist() == [[3], [2]] and found[1, 0].tolist() == [8]


def test_a_trajectory_is_drafted_when_its_first_token_comes_up() -> None:
    drafter = new(ngram=3, window=1, guesses=1, from_text=False)
    shape = DynamicShape(5, 2, 2)
    state = drafter.start(run([[5, 6]], [0]), shape, capacity=32)
    proposal = drafter.propose(state, PlainNoise())
    column = proposal.tokens[0, 1:3].tolist()
    accepted = run(
        [[6, column[0]]], [1]
    )  # nothing drafted is accepted, but the bonus is the column's first token
    picks = torch.tensor([[column[0], 33, 34, 35, 36]])
    accepted.verified = Verified(
        proposal.tokens, picks, proposal.tree, torch.zeros(1, 3, dtype=torch.int64)
    )
    after = drafter.propose(drafter.commit(state, accepted), PlainNoise()).tokens[0].tolist()
    # root; window moved down; n-gram (column, 34)
    assert after == [column[0], column[1], 34, column[1], 34]


# What is refused


def test_impossible_settings_are_refused() -> None:
    with pytest.raises(UserError, match=r"head\.ngram must lie in \[2, 1024\]; given: 1"):
        Config(ngram=1)
    with pytest.raises(UserError, match=r"needs a draft of depth 8 and 31 nodes; .* give 3 and 9"):
        lay_out(Config(window=6, guesses=4), DynamicShape(9, 3, 3), CPU)
    with pytest.raises(UserError, match=r"needs a draft of depth 5 and 11 nodes"):
        lay_out(Config(ngram=6), DynamicShape(9, 3, 3), CPU)
    with pytest.raises(UserError, match=r"head\.pool=64 cannot take .* 81 nodes"):
        lay_out(Config(pool=64), DynamicShape(81, 8, 8), CPU)
