"""Drafters without weights for proving the decoder: always right, always wrong, right up to a
planted error, random.

Each fills any static tree, `RandomTrees` dynamic shapes.

The right ones know the answers beforehand: a mapping from prompt tokens to the plain continuation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from heads.api.drafter import Proposal, TargetStates
from heads.api.features import FeatureSpec
from heads.api.tree import DraftShape, DynamicShape, TokenTree


@dataclass
class FakeState:
    """text [B, S] the known sequence of each row (prompt and plain continuation), length [B]
    committed tokens, root included."""

    text: Tensor
    root: Tensor
    length: Tensor


class Fake:
    """Base: drafts the known continuation, then lets `spoil` change it. `answers` maps a prompt to
    prompt + continuation."""

    kind: ClassVar[str] = "fake"
    needs = FeatureSpec()

    def __init__(
        self, answers: dict[tuple[int, ...], list[int]], vocab_size: int, seed: int = 0
    ) -> None:
        self.answers, self.vocab_size = answers, vocab_size
        self.generator = torch.Generator().manual_seed(seed)
        self.tree: TokenTree | None = None

    def start(self, seen: TargetStates, tree: TokenTree, capacity: int) -> FakeState:
        self.tree = tree
        rows = []
        for tokens, length in zip(seen.tokens.tolist(), seen.lengths.tolist(), strict=True):
            known = self.answers.get(tuple(tokens[:length]), tokens[:length])
            rows.append((known + [0] * capacity)[:capacity])
        state = FakeState(
            torch.tensor(rows),
            torch.zeros(len(rows), dtype=torch.int64),
            torch.zeros(len(rows), dtype=torch.int64),
        )
        return self.commit(state, seen)

    def propose(self, state: FakeState, noise: Any) -> Proposal:
        assert self.tree is not None
        depth = self.tree.depth.expand(state.root.shape[0], -1)
        places = (state.length[:, None] - 1 + depth).clamp(max=state.text.shape[1] - 1)
        tokens = self.spoil(state.text.gather(1, places), depth)
        tokens[:, 0] = state.root
        return Proposal(tokens, self.tree)

    def commit(self, state: FakeState, accepted: TargetStates) -> FakeState:
        last = accepted.lengths[:, None] - 1
        state.root = accepted.next_tokens.gather(1, last)[:, 0]
        state.length = accepted.positions.gather(1, last)[:, 0] + 2
        return state

    def spoil(self, tokens: Tensor, depth: Tensor) -> Tensor:
        return tokens


class AlwaysRight(Fake):
    """In a tree only the last node of every level is right, so that the accepted path is no run of
    slots."""

    def spoil(self, tokens: Tensor, depth: Tensor) -> Tensor:
        assert self.tree is not None
        right = on_last_path(self.tree)
        return torch.where(right, tokens, (tokens + 1) % self.vocab_size)


class AlwaysWrong(Fake):
    """Never proposes the right token (the known continuation plus one)."""

    def spoil(self, tokens: Tensor, depth: Tensor) -> Tensor:
        return (tokens + 1) % self.vocab_size


class SometimesRight(Fake):
    """Each token right with probability 0.7: exercises every length of accepted path, ragged over
    rows."""

    def spoil(self, tokens: Tensor, depth: Tensor) -> Tensor:
        wrong = torch.rand(tokens.shape, generator=self.generator) > 0.7
        return torch.where(wrong, (tokens + 1 + depth) % self.vocab_size, tokens)


class RandomTokens(Fake):
    """Drafts random tokens."""

    def spoil(self, tokens: Tensor, depth: Tensor) -> Tensor:
        return torch.randint(0, self.vocab_size, tokens.shape, generator=self.generator)


def on_last_path(tree: TokenTree) -> Tensor:
    """[1, N] bool: the nodes on the way to the deepest node with the greatest number."""
    deepest = int((tree.depth[0] * tree.num_nodes + torch.arange(tree.num_nodes)).argmax())
    return tree.ancestors[:1, deepest]


class RandomTrees(Fake):
    """Another random tree for every row and step, of any topology that fits a `DynamicShape`; of
    siblings at most one is right."""

    def start(self, seen: TargetStates, tree: DraftShape, capacity: int) -> FakeState:
        assert isinstance(tree, DynamicShape)
        self.shape = tree
        return super().start(seen, TokenTree.chain(1), capacity)

    def propose(self, state: FakeState, noise: Any) -> Proposal:
        rows = [self._topology() for _ in range(state.root.shape[0])]
        self.tree = TokenTree.from_parents(
            torch.tensor([parents for parents, _ in rows]), self.shape.max_depth
        )
        self.offsets = torch.tensor([offsets for _, offsets in rows])
        return super().propose(state, noise)

    def _topology(self) -> tuple[list[int], list[int]]:
        """Parents, and how far each token is from the right one."""
        parents, depth, offsets, children = [0], [0], [0], [0]
        shift = [self._below(3)]
        for node in range(1, self.shape.nodes):
            allowed = [i for i in range(node) if depth[i] < self.shape.max_depth]
            # mostly below the last node, so that deep trees come up as well
            parent = (
                node - 1
                if node - 1 in allowed and self._below(2)
                else allowed[self._below(len(allowed))]
            )
            parents.append(parent)
            depth.append(depth[parent] + 1)
            offsets.append(children[parent] - shift[parent])
            children[parent] += 1
            children.append(0)
            shift.append(self._below(3))
        return parents, offsets

    def _below(self, bound: int) -> int:
        return int(torch.randint(0, bound, (), generator=self.generator))

    def spoil(self, tokens: Tensor, depth: Tensor) -> Tensor:
        return (tokens + self.offsets) % self.vocab_size
