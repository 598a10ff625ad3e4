"""The walk and the compaction: Triton kernels and torch references against loops that a person can
read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from heads.api.tree import TokenTree
from inference.decoding.rules.accept import Walk, walk
from inference.kernels.reference import commit as reference_commit
from inference.kernels.reference.commit import ACCEPT_WALK, COMPACT, WRITE_SLOTS
from tests.heads.kernels.devices import DEVICES, ON_CPU

Move = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]


# The walk


def tree_of(shape: str, nodes: int, rows: int, device: str) -> TokenTree:
    """A chain, a fan of siblings, one random tree for all rows, or one of its own for each row."""
    if shape == "chain":
        return TokenTree.chain(nodes - 1, device)
    count = rows if shape == "dynamic" else 1
    parents = torch.zeros(count, nodes, dtype=torch.int64)
    if shape != "siblings":
        for row in range(count):
            for node in range(1, nodes):
                parents[row, node] = int(torch.randint(max(0, node - 6), node, ()))
    depth = torch.zeros_like(parents)
    for node in range(1, nodes):
        depth[:, node] = depth.gather(1, parents[:, node : node + 1])[:, 0] + 1
    return TokenTree.from_parents(parents.to(device), int(depth.max()))


def slow_walk(tokens: list[int], picks: list[int], parents: list[int]) -> tuple[list[int], bool]:
    """The path to the deepest node whose whole path was picked (of several the lowest-numbered),
    and whether it has children."""
    reached = [[0]]
    for node in range(1, len(tokens)):
        for path in list(reached):
            if path[-1] == parents[node] and tokens[node] == picks[path[-1]]:
                reached.append([*path, node])
    best = max(reached, key=lambda path: (len(path), -path[-1]))
    return best, best[-1] in parents[1:]


def same(left: Walk, right: Walk) -> bool:
    pairs = [
        (left.path, right.path),
        (left.accepted, right.accepted),
        (left.has_children, right.has_children),
    ]
    return all(torch.equal(a, b) and a.dtype == b.dtype for a, b in pairs)


@pytest.mark.rotated
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("nodes", [1, 2, 33, 64, 65])
@pytest.mark.parametrize("shape", ["chain", "siblings", "random", "dynamic"])
def test_walks_are_equal(shape: str, nodes: int, device: str) -> None:
    torch.manual_seed(nodes)
    rows = 4
    tree = tree_of(shape, nodes, rows, device)
    tokens = torch.randint(0, 3, (rows, nodes))  # few tokens: siblings share them often
    picks = torch.randint(0, 3, (rows, nodes))
    if shape == "chain":
        picks[1:, :-1] = tokens[1:, 1:]  # long paths
        picks[2, nodes // 2] = 7
    picks[0] = 9  # a row that accepts nothing
    found = ACCEPT_WALK.triton()(tokens.to(device), picks.to(device), tree)
    assert same(found, walk(tokens.to(device), picks.to(device), tree))
    parents = tree.parents.expand(rows, -1).tolist()
    for row in range(rows):
        path, tested = slow_walk(tokens[row].tolist(), picks[row].tolist(), parents[row])
        assert int(found.accepted[row]) == len(path) - 1 and bool(found.has_children[row]) == tested
        assert found.path[row, : len(path)].tolist() == path
    assert int(found.accepted[0]) == 0


@ON_CPU
def test_of_siblings_with_one_token_the_one_that_leads_deeper_wins() -> None:
    """0 -> 1, 2, 3, all with the pick of 0; behind 2 and 3 stands the pick of 2 and 3, behind 1
    nothing."""
    tree = TokenTree.from_parents(torch.tensor([[0, 0, 0, 0, 2, 3]]), 2)
    tokens, picks = torch.tensor([[5, 7, 7, 7, 8, 8]]), torch.tensor([[7, 8, 8, 8, 0, 0]])
    for run in (walk, ACCEPT_WALK.triton()):
        found = run(tokens, picks, tree)
        assert found.path.tolist() == [[0, 2, 4]] and found.accepted.tolist() == [2]
        assert found.has_children.tolist() == [False]


# The compaction


def slow_move(
    keys: Tensor, values: Tensor, lengths: Tensor, path: Tensor, accepted: Tensor | None
) -> None:
    """Slot by slot, out of a copy."""
    for storage in (keys, values):
        old = storage.clone()
        for row, length in enumerate(lengths.tolist()):
            last = path.shape[1] - 1 if accepted is None else int(accepted[row])
            for place in range(last + 1):
                storage[:, row, :, length + place] = old[:, row, :, length + int(path[row, place])]


def eager_move(
    keys: Tensor, values: Tensor, lengths: Tensor, path: Tensor, accepted: Tensor | None
) -> None:
    """What a kernel without a barrier may do: slots are written, last ones first, before others
    have been read."""
    for storage in (keys, values):
        for row, length in enumerate(lengths.tolist()):
            last = path.shape[1] - 1 if accepted is None else int(accepted[row])
            for place in reversed(range(last + 1)):
                storage[:, row, :, length + place] = storage[
                    :, row, :, length + int(path[row, place])
                ]


def case(
    dtype: torch.dtype,
    nodes: int,
    depth: int,
    sizes: tuple[int, int] = (24, 80),
    device: str = "cpu",
) -> Move:
    """Random storages of 3 layers, rows of lengths 0, 5 and 9 with ascending paths of 0 to `depth`
    accepted nodes."""
    torch.manual_seed(nodes)
    rows, lengths = 3, torch.tensor([0, 5, 9])
    storages = [torch.randn(3, rows, 2, 9 + nodes, size).to(dtype) for size in sizes]
    path = torch.zeros(rows, depth + 1, dtype=torch.int64)
    accepted = torch.tensor([depth, depth // 2, 0])
    for row in range(rows):
        count = int(accepted[row])
        path[row, 1 : count + 1] = (torch.randperm(nodes - 1)[:count] + 1).sort().values
    return (*(t.to(device) for t in (*storages, lengths, path, accepted)),)  # type: ignore[return-value]


def after(move: Callable[..., Any], given: Move) -> tuple[Tensor, Tensor]:
    keys, values = given[0].clone(), given[1].clone()
    move(keys, values, *given[2:])
    return keys, values


@pytest.mark.rotated
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("nodes", "depth"), [(2, 1), (33, 8), (64, 20), (65, 3)])
def test_moves_are_equal_bit_by_bit(
    nodes: int, depth: int, dtype: torch.dtype, device: str
) -> None:
    given = case(dtype, nodes, depth, device=device)
    expected = after(slow_move, given)
    for move in (reference_commit.compact, COMPACT.triton()):
        found = after(move, given)
        assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])


@pytest.mark.parametrize("device", DEVICES)
def test_without_counts_the_whole_path_moves(device: str) -> None:
    given = (*case(torch.float32, 12, 5, device=device)[:4], None)
    expected = after(slow_move, given)
    for move in (reference_commit.compact, COMPACT.triton()):
        found = after(move, given)
        assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])


@pytest.mark.parametrize("device", DEVICES)
def test_sources_and_targets_overlap(device: str) -> None:
    """Path 0, 2, 3, 5: slot 2 is read for place 1 and written for place 2, slot 3 read for place 2
    and written for place 3."""
    keys, values, lengths, _, _ = case(torch.float32, 8, 3)
    path, accepted = torch.tensor([[0, 2, 3, 5]] * 3), torch.tensor([3, 3, 2])
    given: Move = tuple(t.to(device) for t in (keys, values, lengths, path, accepted))  # type: ignore[assignment]
    expected = after(slow_move, given)
    for move in (reference_commit.compact, COMPACT.triton()):
        found = after(move, given)
        assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
    wrong = after(eager_move, given)
    assert not torch.equal(wrong[0], expected[0]), (
        "the case must catch a move that writes before it has read"
    )


@ON_CPU
def test_a_path_wider_than_the_tree_names_no_slot_behind_the_cache() -> None:
    """A dynamic tree may have fewer nodes than its depth allows: places behind the accepted ones
    are not touched."""
    path, accepted = torch.tensor([[0, 1, 0, 0, 0]]), torch.tensor([1])
    for move in (reference_commit.compact, COMPACT.triton()):
        keys, values = torch.randn(1, 1, 1, 6, 4), torch.randn(1, 1, 1, 6, 4)
        before = keys.clone()
        move(keys, values, torch.tensor([4]), path, accepted)
        assert torch.equal(keys, before)


@ON_CPU
def test_a_view_of_a_larger_storage_is_moved_in_place() -> None:
    keys, values, lengths, path, accepted = case(torch.float32, 12, 5)
    wide = torch.zeros(*keys.shape[:3], keys.shape[3] + 3, keys.shape[4])
    wide[:, :, :, :-3] = keys
    expected, _ = after(slow_move, (keys, values, lengths, path, accepted))
    COMPACT.triton()(wide[:, :, :, :-3], values, lengths, path, accepted)
    assert torch.equal(wide[:, :, :, :-3], expected) and not wide[:, :, :, -3:].any()


# Writing


@pytest.mark.rotated
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("key_size", "value_size"), [(16, 16), (24, 7), (3, 40)])
def test_fresh_keys_and_values_go_to_their_slots(
    device: str, dtype: torch.dtype, key_size: int, value_size: int
) -> None:
    """Row by row and node by node; fresh states come as attention layers have them, transposed."""
    rows, heads, nodes, slots = 3, 2, 5, 20
    torch.manual_seed(0)
    keys = torch.randn(2, rows, heads, slots, key_size).to(device, dtype)[1]
    values = torch.randn(rows, heads, slots, value_size).to(device, dtype)
    fresh_keys = torch.randn(rows, nodes, heads, key_size).to(device, dtype).transpose(1, 2)
    fresh_values = torch.randn(rows, nodes, heads, value_size).to(device, dtype).transpose(1, 2)
    places = torch.tensor([[4, 5, 6, 7, 8], [19, 0, 3, 2, 1], [9, 11, 10, 12, 13]], device=device)
    wanted = keys.clone(), values.clone()
    for row in range(rows):
        for node in range(nodes):
            wanted[0][row, :, int(places[row, node])] = fresh_keys[row, :, node]
            wanted[1][row, :, int(places[row, node])] = fresh_values[row, :, node]
    for write in (reference_commit.write_slots, WRITE_SLOTS.triton()):
        found = keys.clone(), values.clone()
        write(*found, fresh_keys, fresh_values, places)
        assert torch.equal(found[0], wanted[0]) and torch.equal(found[1], wanted[1])
