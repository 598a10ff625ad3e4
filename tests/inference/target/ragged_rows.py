"""Ragged rows that are verified as trees, held against decoding one token at a time and against the
library's own forward pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from heads.api.features import FeatureSpec
from heads.api.tree import TokenTree
from inference.target.model import TargetModel
from inference.target.recurrent.cache import RecurrentCache
from tests.inference.target.test_families import path_to
from tests.models import VOCAB

LENGTHS = (9, 4, 13)
NEEDS = FeatureSpec()
COUNTS = ((3, 1, 0), (1, 2, 2), (2, 3, 1))
"""Nodes that the rows commit in three verifications in a row; 0: a row that is not running."""


def chain(_: torch.Generator) -> TokenTree:
    return TokenTree.chain(5)


def random_tree(rows: int) -> Callable[[torch.Generator], TokenTree]:
    """Trees of 14 nodes, each behind one of the five before it."""

    def make(generator: torch.Generator) -> TokenTree:
        def parents() -> list[int]:
            later = range(2, 14)
            return [
                *(0, 0),
                *(int(torch.randint(max(n - 5, 0), n, (1,), generator=generator)) for n in later),
            ]

        return TokenTree.from_parents(torch.tensor([parents() for _ in range(rows)]), 13)

    return make


TREES = {"chain": chain, "static": random_tree(1), "dynamic": random_tree(len(LENGTHS))}


@dataclass
class Gaps:
    """The largest difference of each sort, relative to the largest value."""

    found: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, one: Tensor, other: Tensor) -> None:
        scale = float(other.abs().max().clamp(min=1e-9))
        gap = float((one - other).abs().max()) / scale
        self.found[name] = max(self.found.get(name, 0.0), gap)


class Rows:
    """Three ragged rows that are verified as trees, and again one token at a time."""

    def __init__(self, target: TargetModel, model: Any = None, chunk: int = 0) -> None:
        """model: the same weights as the library has them; None compares with single steps
        alone."""
        self.target, self.model = target, model
        self.generator = torch.Generator().manual_seed(1)
        self.texts = [self.tokens(length + 1) for length in LENGTHS]  # the last one is the root
        self.lengths, self.gaps = torch.tensor(LENGTHS), Gaps()
        padded = torch.full((3, max(LENGTHS)), 7)
        for row, text in enumerate(self.texts):
            padded[row, : len(text) - 1] = torch.tensor(text[:-1])
        self.cache, self.slow = (self.target.new_cache(3, 64) for _ in range(2))
        rows = torch.arange(3)
        first, _ = self.target.prefill(self.cache, rows, padded, self.lengths, NEEDS, chunk)
        for row in range(3):  # each alone
            own = padded[row : row + 1, : LENGTHS[row]]
            alone, _ = self.target.prefill(
                self.slow, rows[row : row + 1], own, self.lengths[row : row + 1], NEEDS
            )
            self.gaps.add("prefill", first[row], alone[0])
            if self.model is not None:
                self.gaps.add("library", first[row], self.library_logits(self.texts[row][:-1]))

    def tokens(self, count: int) -> list[int]:
        return [int(n) for n in torch.randint(3, VOCAB, (count,), generator=self.generator)]

    @torch.no_grad()
    def library_logits(self, text: list[int]) -> Tensor:
        assert self.model is not None
        found: Tensor = self.model(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1]
        return found

    def verify(self, tree: TokenTree, counts: tuple[int, ...]) -> None:
        """One verification, of which `counts` nodes of the longest path are committed, at most."""
        drafts = torch.tensor([self.tokens(tree.num_nodes) for _ in range(3)])
        drafts[:, 0] = torch.tensor([text[-1] for text in self.texts])
        logits, _, _ = self.target.verify(
            self.cache, drafts, tree, self.lengths, int(self.lengths.max()), NEEDS
        )
        parents = tree.parents.expand(3, -1).tolist()
        depth = tree.depth.expand(3, -1)
        path = torch.zeros(3, tree.max_depth + 1, dtype=torch.int64)
        count = torch.zeros(3, dtype=torch.int64)
        for row in range(3):
            for node in range(0, tree.num_nodes, 3) if self.model is not None else ():
                behind = [int(drafts[row, n]) for n in path_to(node, parents[row])[1:]]
                wanted = self.library_logits([*self.texts[row], *behind])
                self.gaps.add("library", logits[row, node], wanted)
            route = path_to(int(depth[row].argmax()), parents[row])
            path[row, : len(route)] = torch.tensor(route)
            count[row] = min(counts[row], len(route))
        accepted = (count - 1).clamp(min=0)
        self.cache.commit(tree, self.lengths, path, accepted, count)
        self._one_by_one(drafts, path, count, logits)
        for row in range(3):
            kept = [int(drafts[row, node]) for node in path[row, : int(count[row])]]
            if kept:
                self.texts[row] = [*self.texts[row][:-1], *kept, *self.tokens(1)]
        self.lengths = self.lengths + count

    def _one_by_one(self, drafts: Tensor, path: Tensor, count: Tensor, logits: Tensor) -> None:
        """The committed tokens again, in single steps of the other cache; then the states of
        both."""
        one, root = TokenTree.chain(0), torch.zeros(3, 1, dtype=torch.int64)
        for step in range(int(count.max())):
            runs = step < count
            node = path[:, step]
            lengths = self.lengths + torch.minimum(torch.tensor(step), count)
            token = drafts.gather(1, node[:, None])
            alone, _, _ = self.target.verify(
                self.slow, token, one, lengths, int(lengths.max()), NEEDS
            )
            for row in runs.nonzero()[:, 0].tolist():
                self.gaps.add("own", logits[row, node[row]], alone[row, 0])
            self.slow.commit(one, lengths, root, root[:, 0], runs.long())
        if isinstance(self.cache, RecurrentCache):
            for found, wanted in zip(states_of(self.cache), states_of(self.slow), strict=True):
                self.gaps.add("state", found, wanted)


def states_of(cache: Any) -> list[Tensor]:
    assert isinstance(cache, RecurrentCache)
    shapes = cache.states.shapes()
    return [cache.states.state(key, shapes[key]) for key in sorted(shapes)]


def compared(rows: Rows, shape: str) -> Gaps:
    """Three verifications in a row."""
    for counts in COUNTS:
        rows.verify(TREES[shape](rows.generator), counts)
    return rows.gaps
