"""Jacobi decoding as a drafter: the target's picks of one pass are the guesses for the next.

This is parallel decoding as a fixed-point iteration (Santilli et al., 2305.10427). A chain of
guesses follows the root. Every verification returns the target's pick after each guess, right or
wrong; these picks are the next guesses for their positions. After a accepted tokens the chain moves
on by a + 1 positions and its tail is filled anew. The drafter has no weights and reads no states of
the target.

Above temperature 0 the target's pick at a position is argmax(log p + g) with noise that is keyed by
the absolute position. It is therefore a fixed function of the text before it, and the iteration has
a fixed point at any temperature: the text that plain decoding samples. Rules that pick in another
way lose that property, but stay correct.

There is only one guess per position, so a dynamic shape is filled with the longest chain that fits
and a static tree with a chain of its depth.

Legend: B rows, N nodes, D depth of the chain.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from heads.api.config import config
from heads.api.drafter import Noise, Proposal, TargetStates
from heads.api.features import FeatureSpec
from heads.api.target_info import TargetInfo
from heads.api.tree import DraftShape
from heads.nn.drafting.plan import ChainCache, Fixed
from heads.nn.lookup.history import History


@config("head")
@dataclass(frozen=True)
class Config:
    """Configuration of Jacobi drafting."""

    fill: Literal["follow", "prompt", "repeat"] = "follow"
    """Guess at a position for which no pass has a pick yet: follow (the token that followed the
    last occurrence of the preceding guess), prompt (pseudo-random tokens of the text so far),
    repeat (the preceding guess)."""


@dataclass
class State:
    """history: the row's text; guesses [B, D] int64 for the next positions; chain: their tree."""

    history: History
    guesses: Tensor
    chain: Fixed


class Drafter:
    """Jacobi iteration on each row's chain of guesses."""

    kind: ClassVar[str] = "jacobi"

    def __init__(self, config: Config, info: TargetInfo) -> None:
        self.config = config
        self.info = info
        self.needs = FeatureSpec(verified=True)
        self._chains = ChainCache()

    def start(self, seen: TargetStates, tree: DraftShape, capacity: int) -> State:
        """State after prefill, where every guess is filled in; see the protocol."""
        chain = self._chains.of(tree, seen.tokens.device)
        guesses = seen.tokens.new_zeros(seen.tokens.shape[0], chain.tree.max_depth)
        state = State(History.start(seen, tree.max_depth, capacity), guesses, chain)
        self._guess(state, guesses, torch.zeros_like(guesses, dtype=torch.bool))
        return state

    def propose(self, state: State, noise: Noise) -> Proposal:
        """The guesses as a chain; they are certain, so there are no logits."""
        return Proposal(torch.cat([state.history.root, state.guesses], 1), state.chain.tree)

    def commit(self, state: State, accepted: TargetStates) -> State:
        """Move the picks of the last pass to the positions they were picked for; see the protocol.

        If no tree or another tree was verified, there are no picks to use: all guesses are filled
        in.
        """
        state.history.append(accepted)
        depth, verified = state.guesses.shape[1], accepted.verified
        moved, picked = state.guesses, torch.zeros_like(state.guesses, dtype=torch.bool)
        if verified is not None and verified.tree is state.chain.tree:
            # Node i has depth i. After a accepted drafts the root has depth a + 1, and its j-th
            # successor was picked at node a + j.
            ahead = torch.arange(1, depth + 1, device=picked.device)
            node = (accepted.lengths - 1)[:, None] + ahead
            picked = node <= depth
            moved = verified.picks.gather(1, node.clamp(max=depth))
        self._guess(state, moved, picked)
        return state

    def _guess(self, state: State, moved: Tensor, picked: Tensor) -> None:
        """Set the guesses: `moved` [B, D] where `picked`, others by `Config.fill` from the last
        one."""
        history, guess = state.history, state.history.root
        ahead = torch.arange(1, moved.shape[1] + 1, device=moved.device)
        drawn, guesses = history.drawn(history.last + ahead), []
        for place in range(moved.shape[1]):
            filled = drawn[:, place : place + 1] if self.config.fill != "repeat" else guess
            if self.config.fill == "follow":
                filled = history.following(guess, filled)
            guess = torch.where(picked[:, place : place + 1], moved[:, place : place + 1], filled)
            guesses.append(guess)
        state.guesses.copy_(torch.cat(guesses, 1))
