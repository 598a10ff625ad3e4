"""n-gram lookup: what it copies, in chains, trees and refilled rows."""

from __future__ import annotations

import pytest
import torch

from heads.api.drafter import TargetStates
from heads.api.errors import UserError
from heads.api.state import write_rows
from heads.api.tree import DynamicShape, TokenTree
from heads.ngram import Config, Drafter
from tests.heads.micro import PlainNoise, micro_target


def run(tokens: list[list[int]], first: list[int]) -> TargetStates:
    """The committed run first[b].. of each row; the last token of each list is the root."""
    width = max(len(row) for row in tokens) - 1
    padded = torch.tensor([row + [9] * (width + 1 - len(row)) for row in tokens])
    valid = torch.tensor([[i < len(row) - 1 for i in range(width)] for row in tokens])
    positions = torch.tensor(first)[:, None] + torch.arange(width)
    return TargetStates(padded[:, :-1], padded[:, 1:], positions, valid)


def slow_lookup(history: list[int], depth: int, min_n: int, max_n: int) -> list[int]:
    """The definition: longest n first, most recent occurrence, continuation cycled past the end."""
    for n in range(max_n, min_n - 1, -1):
        # history[end] is what followed the occurrence
        for end in range(len(history) - 1, n - 1, -1):
            if len(history) > n and history[end - n : end] == history[-n:]:
                follow = history[end:]
                return [follow[i % len(follow)] for i in range(depth)]
    return [history[-1]] * depth


@pytest.fixture
def drafter() -> Drafter:
    return Drafter(Config(min_n=1, max_n=3), micro_target().info)


def test_lookup_equals_its_definition_over_a_growing_ragged_batch(drafter: Drafter) -> None:
    generator = torch.Generator().manual_seed(0)
    histories = [
        torch.randint(0, 3, (length,), generator=generator).tolist() for length in (4, 9, 13)
    ]
    state = drafter.start(run(histories, [0, 0, 0]), TokenTree.chain(4), capacity=64)
    for _ in range(8):
        proposal = drafter.propose(state, PlainNoise())
        for row, history in enumerate(histories):
            assert proposal.tokens[row].tolist() == [history[-1], *slow_lookup(history, 4, 1, 3)]
        grown = [torch.randint(0, 3, (1 + row,), generator=generator).tolist() for row in range(3)]
        accepted = run(
            [h[-1:] + g for h, g in zip(histories, grown, strict=True)],
            [len(h) - 1 for h in histories],
        )
        state = drafter.commit(state, accepted)
        histories = [h + g for h, g in zip(histories, grown, strict=True)]


def test_tree_carries_the_chain_along_its_best_children(drafter: Drafter) -> None:
    tree = TokenTree.from_choices([[0], [1], [0, 0], [0, 1], [1, 0]])
    state = drafter.start(run([[5, 6, 7, 5]], [0]), tree, capacity=16)
    assert drafter.propose(state, PlainNoise()).tokens.tolist() == [[5, 6, 5, 7, 5, 5]]


def test_refilled_row_forgets_its_past(drafter: Drafter) -> None:
    tree = TokenTree.chain(2)
    state = drafter.start(run([[5, 6, 7, 5], [1, 2, 3, 4]], [0, 0]), tree, capacity=16)
    write_rows(state, torch.tensor([0]), drafter.start(run([[8, 3, 8]], [0]), tree, capacity=16))
    assert drafter.propose(state, PlainNoise()).tokens.tolist() == [[8, 3, 8], [4, 4, 4]]


def test_impossible_lengths_are_refused() -> None:
    with pytest.raises(UserError, match="min_n=3, max_n=2"):
        Config(min_n=3, max_n=2)


def test_a_dynamic_shape_is_filled_with_a_chain_that_fits(drafter: Drafter) -> None:
    for shape, depth in ((DynamicShape(9, 4, 3), 4), (DynamicShape(3, 4, 3), 2)):
        proposal = drafter.propose(
            drafter.start(run([[5, 6, 5]], [0]), shape, capacity=16), PlainNoise()
        )
        assert proposal.tokens.tolist() == [[5, 6, 5, 6, 5][: depth + 1]]


def test_a_match_may_be_allowed_to_be_longer_than_the_text() -> None:
    long = Drafter(Config(min_n=1, max_n=128), micro_target().info)
    shape = TokenTree.chain(4)
    state = long.start(run([[5, 6, 5]], [0]), shape, capacity=16)
    assert long.propose(state, PlainNoise()).tokens.tolist() == [[5, 6, 5, 6, 5]]
