"""Trees searched from acceptance rates: against all trees there are, and rates against a drafter
whose ranks are planned.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from heads.api.drafter import Proposal
from heads.api.errors import UserError
from heads.api.tree import TokenTree
from inference.decoding.config import DecodeConfig
from inference.tune.tree_search import RankStatistics, measure_ranks, search_tree
from tests.fakes import Fake, FakeState
from tests.inference.decoding.test_lossless import answers, decode, requests
from tests.inference.decoding.test_lossless_kinds import drafter_of
from tests.models import VOCAB, random_target

Path = tuple[int, ...]


def chance(path: Path, accuracy: list[list[float]]) -> float:
    product = 1.0
    for depth, rank in enumerate(path):
        product *= accuracy[depth][rank]
    return product


def all_trees(depth: int, ranks: int, nodes: int) -> set[frozenset[Path]]:
    """Every set of `nodes` paths that holds each one's prefix and better sibling."""
    found = {frozenset[Path]()}
    for _ in range(nodes):
        grown = set()
        for tree in found:
            for parent in [(), *tree]:
                rank = sum(path[:-1] == parent for path in tree)
                if len(parent) < depth and rank < ranks:
                    grown.add(tree | {(*parent, rank)})
        found = grown
    return found


@pytest.mark.parametrize("seed", range(12))
def test_no_tree_keeps_more_tokens_than_the_searched_one(seed: int) -> None:
    draw = random.Random(seed)
    depth, ranks, nodes = draw.choice([(2, 3, 6), (3, 2, 6), (3, 3, 5), (1, 3, 3), (4, 1, 4)])
    accuracy = []
    for _ in range(depth):
        rates = sorted((draw.random() for _ in range(ranks)), reverse=True)
        total = sum(rates) * (1 + 0.3 * draw.random())
        accuracy.append([rate / total for rate in rates])
    found = search_tree(accuracy, nodes + 1)
    assert len(found.choices) == nodes
    assert found.tau == pytest.approx(1 + sum(chance(path, accuracy) for path in found.choices))
    best = max(
        1 + sum(chance(path, accuracy) for path in tree) for tree in all_trees(depth, ranks, nodes)
    )
    assert found.tau == pytest.approx(best)
    assert TokenTree.from_choices(found.choices).num_nodes == nodes + 1


def test_nodes_that_are_never_reached_are_left_out() -> None:
    found = search_tree([[0.5, 0.5, 0.0], [0.3, 0.0, 0.0]], 50)
    assert found.choices == ((0,), (1,), (0, 0), (1, 0))
    assert found.tau == pytest.approx(1 + 0.5 + 0.5 + 0.15 + 0.15)


def test_rates_that_make_no_sense_are_refused() -> None:
    for rates in ([0.2, 0.3], [0.9, 0.4], [-0.1], []):
        with pytest.raises(
            UserError, match="rates of depth 2 must be 0 or more, not rise with the rank"
        ):
            search_tree([[0.5, 0.2], rates], 4)
    with pytest.raises(UserError, match="at least 2 nodes and one depth; given 1 and 1"):
        search_tree([[0.5]], 1)
    with pytest.raises(UserError, match="never picked a drafted candidate"):
        search_tree([[0.0, 0.0]], 4)
    with pytest.raises(UserError, match="no drafts were verified"):
        RankStatistics.empty(3, 2).accuracy()


def test_rates_out_of_order_are_averaged() -> None:
    statistics = RankStatistics([10, 4], [[5, 1, 2, 1], [1, 1, 1, 1]])
    assert statistics.accuracy()[0] == pytest.approx([0.5, 0.15, 0.15, 0.1])
    assert statistics.accuracy()[1] == pytest.approx([0.25] * 4)
    rising = RankStatistics([10], [[1, 2, 6]])
    assert rising.accuracy()[0] == pytest.approx([0.3] * 3)


class PlannedRanks(Fake):
    """Knows the answers; ranks the right token at position p as `plan[p]` says, among tokens that
    never come."""

    plan: list[int]

    def propose(self, state: FakeState, noise: Any) -> Proposal:
        assert self.tree is not None
        depth = self.tree.max_depth
        positions = state.length[:, None] + torch.arange(depth)
        logits = torch.zeros(len(positions), depth, self.vocab_size)
        for row, column in ((r, c) for r in range(len(positions)) for c in range(depth)):
            place = int(positions[row, column])
            right = int(state.text[row, min(place, state.text.shape[1] - 1)])
            order = [token for token in range(self.vocab_size) if token != right]
            order.insert(self.plan[place], right)
            logits[row, column, order] = -torch.arange(self.vocab_size).float()
        picks: Tensor = noise.pick(logits, positions)
        return Proposal(torch.cat([state.root[:, None], picks], 1), self.tree)


def test_ranks_are_counted_where_the_drafts_before_were_kept() -> None:
    target = random_target()
    items = requests(3, new=30)
    plain = decode(target, None, DecodeConfig(), items)
    draw = random.Random(2)
    fake = PlannedRanks(answers(plain), VOCAB)
    fake.plan = [draw.choice([0, 0, 0, 1, 2, 5]) for _ in range(200)]
    depth, ranks = 3, 4
    found = measure_ranks(target, fake, items, DecodeConfig(depth=depth), ranks)
    expected = RankStatistics.empty(depth, ranks)
    for item in items:
        root, end = len(item.tokens), len(item.tokens) + len(plain[item.index].tokens) - 1
        while root < end:
            kept = 0
            for place in range(depth):
                if root + place + 1 > end:
                    break
                rank = fake.plan[root + place + 1]
                expected.tested[place] += 1
                if rank < ranks:
                    expected.hits[place][rank] += 1
                if rank:
                    break
                kept += 1
            root += min(kept + 1, end - root)
    assert found == expected
    assert all(found.tested)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", ["medusa", "eagle3", "ngram"])
def test_best_ranks_are_the_accepted_drafts_of_the_chain(kind: str, temperature: float) -> None:
    target = random_target()
    items = requests(12, new=16)
    decode_config = DecodeConfig(depth=3, temperature=temperature)
    statistics = measure_ranks(target, drafter_of(kind, target), items, decode_config, ranks=5)
    passes = [
        p
        for c in decode(target, drafter_of(kind, target), decode_config, items).values()
        for p in c.passes
    ]
    for depth in range(3):
        assert statistics.hits[depth][0] == sum(p.accepted > depth for p in passes)
        assert statistics.tested[depth] == sum(p.committed > depth for p in passes)
    assert sum(statistics.hits[0]) > statistics.hits[0][0] or kind == "ngram"
