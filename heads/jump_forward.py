"""Jump-forward: drafts the tokens that the row's grammar forces, such as the keys and the
punctuation of a JSON schema (structured output). The idea is that of jump-forward decoding in
SGLang (2312.07104); here the tokens are a draft that is verified like any other.

The drafter has no weights and reads no target states. The decoder, which owns the grammar, says
before every step which tokens spell the text that must follow (`guide`), and the drafter proposes
them. A target may write the same text in other tokens, so forced tokens are drafts and are not
committed unverified. Nothing is drafted in rows without a grammar and where the grammar leaves a
choice. Alone, this drafter pays off as far as answers are forced; in a cascade of mode `join`, its
chain is verified beside another drafter's tree.

Legend: B rows, N nodes, D deepest level, F = `FORCED_TOKENS`, T positions of a run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from heads.api.config import config
from heads.api.drafter import FORCED_TOKENS, Noise, Proposal, TargetStates
from heads.api.features import FeatureSpec
from heads.api.target_info import TargetInfo
from heads.api.tree import DraftShape
from heads.nn.drafting.plan import ChainCache, Fixed
from heads.nn.drafting.state import last_valid


@config("head")
@dataclass(frozen=True)
class Config:
    """Configuration of jump-forward, which has no settings."""


@dataclass
class State:
    """root [B] int64; forced [B, F] int64: what must follow it, -1 behind; chain: what is
    filled."""

    root: Tensor
    forced: Tensor
    chain: Fixed


class Drafter:
    """The tokens that each row's grammar forces, as a chain."""

    kind: ClassVar[str] = "jump_forward"

    def __init__(self, config: Config, info: TargetInfo) -> None:
        self.config = config
        self.info = info
        self.needs = FeatureSpec(forced=True)
        self._chains = ChainCache()

    def start(self, seen: TargetStates, tree: DraftShape, capacity: int) -> State:
        """State after prefill; nothing is known to be forced yet."""
        root = last_valid(seen)[2].clone()
        forced = torch.full((root.shape[0], FORCED_TOKENS), -1, device=root.device)
        return State(root, forced, self._chains.of(tree, root.device))

    def guide(self, state: State, forced: Tensor) -> None:
        """See `heads.api.drafter.Guided`."""
        state.forced.copy_(forced)

    def propose(self, state: State, noise: Noise) -> Proposal:
        """The forced tokens as far as the chain goes; deeper nodes are dead and repeat the root."""
        tree, root = state.chain.tree, state.root[:, None]
        forced = state.forced[:, : tree.max_depth]
        forced = torch.nn.functional.pad(forced, (0, tree.max_depth - forced.shape[1]), value=-1)
        tokens = torch.where(forced < 0, root, forced)
        return Proposal(torch.cat([root, tokens], 1), tree, limit=(forced >= 0).sum(1))

    def commit(self, state: State, accepted: TargetStates) -> State:
        """Move on in the forced tokens while the text follows them. Otherwise nothing is known
        until the next `guide`, which a cascade's lower level does not get."""
        size, count = state.forced.shape[1], accepted.lengths[:, None]
        place = torch.arange(size, device=count.device)
        run = accepted.next_tokens.shape[1]
        inside = place < count
        came = accepted.next_tokens.gather(1, place.clamp(max=run - 1).expand(count.shape[0], -1))
        follows = ((came == state.forced) | ~inside).all(1, keepdim=True)
        after = place + count
        rest = state.forced.gather(1, after.clamp(max=size - 1))
        state.forced.copy_(torch.where(follows & (after < size), rest, -1))
        state.root.copy_(last_valid(accepted)[2])
        return state
