"""n-gram lookup (prompt lookup decoding): copies what followed the newest tokens earlier on.

The drafter has no weights and reads no target states. It searches the prompt and the answer so far
for the longest run of tokens, of `min_n` to `max_n` tokens, that equals the newest tokens. Among
runs of that length the most recent one wins, and the tokens after it are proposed. This pays off
when the answer copies from its prompt.

Legend: B rows, N nodes, S slots of history.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from heads.api.config import Size, config
from heads.api.drafter import Noise, Proposal, TargetStates
from heads.api.features import FeatureSpec
from heads.api.one_pass import refuse_dartree
from heads.api.target_info import TargetInfo
from heads.api.tree import DraftShape, one_path
from heads.nn.drafting.plan import LastShape, TreePlan
from heads.nn.lookup.history import History, require_lengths


@config("head")
@dataclass(frozen=True)
class Config:
    """Configuration of n-gram lookup."""

    min_n: Size = 1
    """Shortest run of tokens that counts as a match (>= 1)."""
    max_n: Size = 4
    """Longest run of tokens compared (>= min_n)."""

    def __post_init__(self) -> None:
        require_lengths("ngram", self.min_n, self.max_n)


@dataclass
class State:
    """history: the row's text; plan: the tree that is filled."""

    history: History
    plan: TreePlan


class Drafter:
    """n-gram lookup over each row's own history."""

    kind: ClassVar[str] = "ngram"

    def __init__(self, config: Config, info: TargetInfo) -> None:
        self.config = config
        self.info = info
        self.needs = FeatureSpec()
        self._plans: LastShape[TreePlan] = LastShape()

    def start(self, seen: TargetStates, tree: DraftShape, capacity: int) -> State:
        refuse_dartree(tree)
        plan = self._plans.get(tree, lambda: TreePlan.of(one_path(tree, seen.tokens.device)))
        return State(History.start(seen, tree.max_depth, capacity), plan)

    def propose(self, state: State, noise: Noise) -> Proposal:
        """Fill the rank-0 path with the continuation found; other nodes repeat the root."""
        drafted = self._continuation(state)  # [B, D + 1], the root first
        plan = state.plan
        tokens = drafted[:, plan.node_depth]
        if not plan.tree.is_chain:
            tokens = torch.where(plan.best_path, tokens, drafted[:, :1])
        return Proposal(tokens, plan.tree)

    def commit(self, state: State, accepted: TargetStates) -> State:
        """Append the accepted run to the history; see the protocol."""
        state.history.append(accepted)
        return state

    def _continuation(self, state: State) -> Tensor:
        """The root and the tokens that followed the best match [B, D + 1]. Without a match the root
        is repeated, which is sometimes right at the start of a repetition."""
        history, last = state.history.tokens, state.history.last
        slots = torch.arange(history.shape[1], device=history.device)
        run = slots < last  # a match must end before the newest token, so that something follows it
        matched = torch.zeros_like(history)
        for back in range(min(self.config.max_n, history.shape[1])):
            newest = history.gather(1, (last - back).clamp(min=0))
            same = history[:, : history.shape[1] - back] == newest
            run = run & torch.nn.functional.pad(same, (back, 0)) & (last >= back)
            matched += run
        score = torch.where(matched >= self.config.min_n, matched * history.shape[1] + slots, -1)
        best, end = score.max(1, keepdim=True)  # longest match first, then the most recent one
        # After the newest token the copied stretch starts over, which continues a repetition.
        steps = torch.arange(1, state.plan.tree.max_depth + 1, device=history.device)
        wanted = end + 1 + (steps - 1) % (last - end).clamp(min=1)
        drafted = history.gather(1, wanted.clamp(max=history.shape[1] - 1))
        root = state.history.root
        return torch.cat([root, torch.where(best >= 0, drafted, root)], dim=1)
