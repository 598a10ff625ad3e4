"""The walk along accepted nodes, against a loop that a person can read; and the cache's compaction,
against a copy."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from heads.api.errors import UserError
from heads.api.tree import TokenTree
from inference.decoding.rules.accept import walk
from inference.target.kv_cache import KVCache


def slow_walk(tokens: list[int], picks: list[int], parents: list[int]) -> tuple[list[int], bool]:
    """Path of accepted nodes, and whether drafted tokens were tested at its end."""
    path = [0]
    while True:
        children = [i for i in range(1, len(tokens)) if parents[i] == path[-1]]
        right = [i for i in children if tokens[i] == picks[path[-1]]]
        if not right:
            return path, bool(children)
        path.append(right[0])


def depth_of(parents: list[int], node: int) -> int:
    return 0 if node == 0 else 1 + depth_of(parents, parents[node])


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_walk_equals_the_slow_one_on_random_trees(data: st.DataObject) -> None:
    nodes, rows = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 3))
    trees = data.draw(st.sampled_from([1, rows]))  # one for all rows, or one for each
    drawn = [
        [0] + [data.draw(st.integers(0, i - 1)) for i in range(1, nodes)] for _ in range(trees)
    ]
    deepest = max(depth_of(parents, node) for parents in drawn for node in range(nodes))
    draw_token = st.integers(0, 2)
    tokens, picks = (
        torch.tensor([[data.draw(draw_token) for _ in range(nodes)] for _ in range(rows)])
        for _ in range(2)
    )
    for row in range(rows):  # siblings differ in every real proposal
        parents = drawn[row % trees]
        for node in range(1, nodes):
            siblings = [i for i in range(1, node) if parents[i] == parents[node]]
            while int(tokens[row, node]) in [int(tokens[row, i]) for i in siblings]:
                tokens[row, node] += 3
    found = walk(tokens, picks, TokenTree.from_parents(torch.tensor(drawn), deepest))
    for row in range(rows):
        path, tested = slow_walk(tokens[row].tolist(), picks[row].tolist(), drawn[row % trees])
        assert int(found.accepted[row]) == len(path) - 1
        assert found.path[row, : len(path)].tolist() == path
        assert bool(found.has_children[row]) == tested


@given(
    st.lists(st.integers(0, 1), min_size=2, max_size=6),
    st.lists(st.integers(0, 1), min_size=6, max_size=6),
)
def test_a_chain_is_walked_like_the_same_tree(tokens: list[int], picks: list[int]) -> None:
    nodes = len(tokens)
    parents = [max(i - 1, 0) for i in range(nodes)]
    chain = walk(torch.tensor([tokens]), torch.tensor([picks[:nodes]]), TokenTree.chain(nodes - 1))
    tree = walk(
        torch.tensor([tokens]),
        torch.tensor([picks[:nodes]]),
        TokenTree.from_parents(torch.tensor([parents]), nodes - 1),
    )
    assert torch.equal(chain.accepted, tree.accepted) and torch.equal(
        chain.has_children, tree.has_children
    )


def test_compaction_moves_overlapping_runs_row_by_row() -> None:
    cache = KVCache(2, rows=2, capacity=12)
    cache.writer.rows = torch.arange(2)
    contents = torch.arange(2 * 3 * 12 * 4, dtype=torch.float32).reshape(2, 3, 12, 4)
    for layer in cache.layers:
        layer.update(contents + layer.capacity, contents)
    before = [layer.values.clone() for layer in cache.layers]
    lengths, path = torch.tensor([2, 5]), torch.tensor([[0, 2, 3], [0, 1, 6]])
    cache.compact(lengths, path)
    for layer, old in zip(cache.layers, before, strict=True):
        for row in range(2):
            length = int(lengths[row])
            for place, node in enumerate(path[row].tolist()):
                assert torch.equal(layer.values[row, :, length + place], old[row, :, length + node])
            assert torch.equal(layer.values[row, :, :length], old[row, :, :length])


def test_static_trees_are_checked_and_laid_out_level_by_level() -> None:
    tree = TokenTree.from_choices([[1], [0, 0], [0], [0, 1]])
    assert tree.parents.tolist() == [[0, 0, 0, 1, 1]] and tree.depth.tolist() == [[0, 1, 1, 2, 2]]
    assert tree.max_depth == 2 and not tree.is_chain
    assert TokenTree.from_choices([[0], [0, 0]]).is_chain
    for wrong in ([[0], [1, 0]], [[1]], [[0, 0]]):
        with pytest.raises(UserError, match="list every prefix"):
            TokenTree.from_choices(wrong)
    with pytest.raises(UserError, match=r"decode\.choices has an empty path"):
        TokenTree.from_choices([[0], []])
