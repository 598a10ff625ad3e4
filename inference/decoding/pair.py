"""Two drafters in one batch: every row drafts with one of them, and one verification serves both.

A `DrafterPair` is a drafter itself. Both parts keep a state for all rows, draft for all of them,
and receive everything that is committed. For every row, the draft of its assigned part goes to the
target. So the target's pass, its cache and the shapes of a step are those of one drafter, and a
step additionally costs one more drafter. Gathering each part's rows instead would copy its caches
in every step, and would save nothing if a pass of a few rows takes as long as one of many.

`choose` assigns a row to a part when a request gets the row (`BatchRun.refill`). The assignment is
kept in the state, so that it moves with the row. A part's state of the other part's rows must not
be drafted from, as kinds may rely on the verification of their own drafts. If a row changes to the
other part, its state is rebuilt (`Lanes.change_drafter`).

Legend: B rows, N nodes, V vocabulary, V' its drafted part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from heads.api.drafter import Drafter, Noise, Proposal, TargetStates, forget, select_states
from heads.api.errors import UserError
from heads.api.features import union
from heads.api.tree import DraftShape, TokenTree
from inference.decoding.config import DecodeConfig
from inference.decoding.requests import Request
from inference.decoding.sampling.distribution import SamplingSettings, over_vocabulary
from inference.decoding.sampling.noise import SharedNoise
from inference.target.memory import blank_states
from inference.target.model import TargetModel


@dataclass
class PairState:
    """The states of both parts, and the rows that draft with the second: second_drafts [B] bool."""

    first: Any
    second: Any
    second_drafts: Tensor


class DrafterPair:
    """See the module. choose: whether a request that gets a row drafts with the second."""

    kind: ClassVar[str] = "pair"

    def __init__(
        self, first: Drafter, second: Drafter, vocab_size: int, choose: Callable[[Request], bool]
    ) -> None:
        self.first, self.second = first, second
        self.vocab_size, self.choose = vocab_size, choose
        self.needs = union((first.needs, second.needs))
        self.capturable = all(getattr(part, "capturable", True) for part in (first, second))

    @property
    def parts(self) -> tuple[Drafter, Drafter]:
        return self.first, self.second

    # The Drafter protocol

    def start(self, seen: TargetStates, tree: DraftShape, capacity: int) -> PairState:
        """Both parts' states; all rows draft with the first until `BatchRun` assigns them."""
        first = self.first.start(self._own(seen, self.first), tree, capacity)
        second = self.second.start(self._own(seen, self.second), tree, capacity)
        return PairState(first, second, torch.zeros_like(seen.tokens[:, 0], dtype=torch.bool))

    def propose(self, state: PairState, noise: Noise) -> Proposal:
        first = self.first.propose(state.first, noise)
        second = self.second.propose(state.second, noise)
        return self._select(first, second, state.second_drafts, noise.keeps_logits)

    def commit(self, state: PairState, accepted: TargetStates) -> PairState:
        state.first = self.first.commit(state.first, self._own(accepted, self.first))
        state.second = self.second.commit(state.second, self._own(accepted, self.second))
        return state

    def guide(self, state: PairState, forced: Tensor) -> None:
        """See `heads.api.drafter.Guided`."""
        for part, own in zip(self.parts, (state.first, state.second), strict=True):
            if part.needs.forced:
                guided: Any = part
                guided.guide(own, forced)

    def forget(self) -> None:
        """Make both parts forget other answers, if they keep any."""
        for part in self.parts:
            forget(part)

    def _own(self, seen: TargetStates, part: Drafter) -> TargetStates:
        return select_states(seen, part.needs, self.needs)

    # One proposal of two

    def _select(
        self, first: Proposal, second: Proposal, chosen: Tensor, keeps_logits: bool
    ) -> Proposal:
        """The rows `chosen` [B] of the second proposal, the others of the first. Confidence is
        dropped, as pairs do not support adaptive draft length."""
        tree, column = first.tree, chosen[:, None]
        tokens = torch.where(column, second.tokens, first.tokens)
        # also static trees, and those of one row, of which each part may have its own
        if not tree.is_chain:
            parents = torch.where(column, second.tree.parents, tree.parents)
            depth = torch.where(column, second.tree.depth, tree.depth)
            seen = torch.where(column[..., None], second.tree.ancestors, tree.ancestors)
            tree = TokenTree(parents, depth, seen, tree.max_depth, is_chain=False)
        found = Proposal(tokens, tree, limit=_limits(first, second, chosen))
        if keeps_logits and not (first.logits is None and second.logits is None):
            found.logits, found.token_ids = self._logits(first, second, chosen)
        return found

    def _logits(
        self, first: Proposal, second: Proposal, chosen: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """The logits [B, N, V'] that the nodes' children were drawn from, and the ids of the
        columns."""
        one, other, ids = first.logits, second.logits, first.token_ids
        if one is None or other is None or ids is not second.token_ids:
            one, other = (self._over_all(proposal) for proposal in (first, second))
            ids = None
        dtype = torch.promote_types(one.dtype, other.dtype)
        return torch.where(chosen[:, None, None], other.to(dtype), one.to(dtype)), ids

    def _over_all(self, proposal: Proposal) -> Tensor:
        """Logits [B, N, V]; certain drafts have probability 1."""
        if proposal.logits is not None:
            return over_vocabulary(proposal.logits, proposal.token_ids, self.vocab_size)
        following = torch.nn.functional.pad(proposal.tokens[:, 1:], (0, 1))[..., None]
        shape = *proposal.tokens.shape, self.vocab_size
        none = torch.full(shape, -torch.inf, device=following.device)
        return none.scatter(2, following, 0.0)


def _limits(first: Proposal, second: Proposal, chosen: Tensor) -> Tensor | None:
    if first.limit is None and second.limit is None:
        return None
    one, other = (
        torch.full_like(chosen, part.tree.max_depth, dtype=torch.int64)
        if part.limit is None
        else part.limit
        for part in (first, second)
    )
    return torch.where(chosen, other, one)


def require_pair(
    pair: DrafterPair, target: TargetModel, decode: DecodeConfig, shape: DraftShape
) -> None:
    """Raise `UserError` unless the drafts of `shape` of both parts can be verified together under
    the settings `decode`."""
    for given, what in (
        (decode.ahead, "decode.ahead drafts with one drafter"),
        (decode.adaptive_settings().active, "decode.adaptive adapts the draft of one drafter"),
        (decode.compiles, "decode.compile compiles the step of one drafter"),
    ):
        if given:
            raise UserError(
                f"{what}: two cannot draft side by side. Leave it out, or change the drafter "
                "without a trial."
            )
    info, like = target.info, target.weights.embedding
    seeds = torch.zeros(1, dtype=torch.int64, device=like.device)
    ranked = SamplingSettings(temperature=1.0), seeds, info.vocab_size, None
    noise = SharedNoise(*ranked, keeps_logits=True)

    def draft(part: Drafter) -> Proposal:
        blank = blank_states(part, 1, info, like)
        return part.propose(part.start(blank, shape, shape.num_nodes + 2), noise)

    require_alike(draft(pair.first), draft(pair.second), weighs=decode.rule != "match")


def require_alike(first: Proposal, second: Proposal, weighs: bool) -> None:
    """Raise `UserError` unless two drafts can be verified together. weighs: the drafts of a tree
    are weighed by their probability."""
    trees = first.tree, second.tree
    if len({(tree.num_nodes, tree.max_depth, tree.is_chain) for tree in trees}) > 1:
        raise UserError(
            f"the two drafters fill drafts of different shapes ({trees[0].num_nodes} and "
            f"{trees[1].num_nodes} nodes), which cannot be verified together. Use "
            "decode.shape=chain, or change the drafter without a trial."
        )
    if weighs and not trees[0].is_chain and (first.logits is None) != (second.logits is None):
        raise UserError(
            "of the two drafters one has probabilities and the other has none, and decode.rule "
            "weighs the drafts of a tree by them. Use decode.rule=match or decode.shape=chain, or "
            "change the drafter without a trial."
        )
