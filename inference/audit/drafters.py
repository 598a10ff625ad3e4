"""Scripted drafters for the audit: right with a given probability, always wrong, or random.

A newly initialised drafter is almost never right, so it would not exercise accepting, compacting
and committing. A scripted drafter knows the answer and is right with a given probability, at
positions that differ from step to step and row to row. No draft may change the text.

Legend: B rows, N nodes, S slots of known text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from heads.api.drafter import Noise, Proposal, TargetStates
from heads.api.features import FeatureSpec
from heads.api.tree import DartreeShape, DraftShape, DynamicShape, TokenTree
from inference.kernels.reference.noise import noise_bits

KNOWS = "knows 70%"
_TREES = 1 << 20
"""Added to a row's number, so that the draws for trees differ from those for tokens."""


@dataclass
class State:
    """text [B, S] int64: the known part of each row's text; root, length, row [B] int64: the last
    token, the number of committed tokens, and the row's number."""

    text: Tensor
    root: Tensor
    length: Tensor
    row: Tensor


@dataclass(eq=False)
class ScriptedDrafter:
    """Drafts from known answers; see the module.

    answers: maps the prompt's tokens, or these and the answer's first token, to prompt and answer.
    share_right: the share of drafted tokens that are right; 0: always wrong; None: random tokens.
    """

    kind: ClassVar[str] = "scripted"
    answers: Mapping[tuple[int, ...], Sequence[int]]
    vocab_size: int
    share_right: float | None
    needs: FeatureSpec = field(default_factory=FeatureSpec)
    shape: DraftShape | None = None

    def start(self, seen: TargetStates, tree: DraftShape, capacity: int) -> State:
        """State after prefill; see the protocol."""
        self.shape = tree
        rows, slots = seen.tokens.shape[0], capacity + tree.max_depth + 1
        text = torch.zeros(rows, slots, dtype=torch.int64)
        for row, length in enumerate(seen.lengths.tolist()):
            prompt = tuple(seen.tokens[row, :length].tolist())
            first = int(seen.next_tokens[row, length - 1])
            known = self.answers.get((*prompt, first), self.answers.get(prompt, prompt))[:slots]
            text[row, : len(known)] = torch.tensor(known)
        zeros, numbers = seen.tokens.new_zeros(rows), torch.arange(rows, device=seen.tokens.device)
        return self.commit(State(text.to(zeros.device), zeros, zeros.clone(), numbers), seen)

    def propose(self, state: State, noise: Noise) -> Proposal:
        """Fill the shape; for a dynamic shape, the tree is random too."""
        assert self.shape is not None
        tree = self.shape if isinstance(self.shape, TokenTree) else self._grow(state, self.shape)
        depth = tree.depth.expand(state.root.shape[0], -1)
        place = (state.length[:, None] - 1 + depth).clamp(max=state.text.shape[1] - 1)
        known = state.text.gather(1, place)
        bits = self._draws(state.row, state, depth.shape[1])
        if self.share_right is None:
            tokens = bits % self.vocab_size
        else:
            right = bits < int(self.share_right * 2**32)
            tokens = torch.where(right, known, (known + 1 + depth) % self.vocab_size)
        return Proposal(torch.cat([state.root[:, None], tokens[:, 1:]], 1), tree)

    def commit(self, state: State, accepted: TargetStates) -> State:
        """Store each row's last token and length; see the protocol."""
        last = accepted.lengths[:, None] - 1
        state.root.copy_(accepted.next_tokens.gather(1, last)[:, 0])
        state.length.copy_(accepted.positions.gather(1, last)[:, 0] + 2)
        return state

    def _draws(self, keys: Tensor, state: State, count: int) -> Tensor:
        """Random numbers [B, count] int64 below 2**32, keyed by the row and its length."""
        columns = torch.arange(count, device=keys.device)
        return noise_bits(keys, state.length[:, None], columns)[:, 0].to(torch.int64) & 0xFFFFFFFF

    def _grow(self, state: State, shape: DynamicShape | DartreeShape) -> TokenTree:
        """A random tree per row, no deeper than allowed."""
        draws = self._draws(state.row + _TREES, state, shape.nodes)
        parents, depths = [torch.zeros_like(state.root)], [torch.zeros_like(state.root)]
        for node in range(1, shape.nodes):
            parent = (draws[:, node] % node)[:, None]
            depth = torch.stack(depths, 1).gather(1, parent)
            above = torch.stack(parents, 1).gather(1, parent)
            deepest = depth == shape.max_depth  # its parent has room for one more child
            parents.append(torch.where(deepest, above, parent)[:, 0])
            depths.append(torch.where(deepest, depth, depth + 1)[:, 0])
        return TokenTree.from_parents(torch.stack(parents, 1), shape.max_depth)


def scripted_drafters(
    answers: Mapping[tuple[int, ...], Sequence[int]], vocab_size: int
) -> dict[str, ScriptedDrafter]:
    """The scripted drafters of the audit by name."""
    shares = {KNOWS: 0.7, "always wrong": 0.0, "random": None}
    return {name: ScriptedDrafter(answers, vocab_size, share) for name, share in shares.items()}
