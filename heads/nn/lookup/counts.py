"""Counting what followed earlier occurrences of the newest tokens: a suffix tree's view of a text,
without building the tree.

An occurrence is a place in a text where the newest tokens occurred before. Occurrences with the
same continuation down to a depth stand for one node of the suffix tree; the first of them (they are
ordered, best first) names the node, and its count is the sum of their weights. So tree and counts
are comparisons between K occurrences and K others per depth, whatever the vocabulary.

Legend: B rows, K occurrences, D depth, P parents at one level, N nodes of the draft.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from heads.api.drafter import Proposal
from heads.api.tree import DynamicShape, TokenTree
from heads.nn.drafting.plan import DynamicPlan, Plan, TreePlan


@dataclass
class Counted:
    """Per depth d (entry d - 1), for every occurrence: tokens [B, D, K] int64, the token that
    followed; count [B, D, K] float32, the weight of those that continue like it down to here; total
    [B], the weight of all; alike [B, D, K, K] bool; leads [B, D, K] bool: it is the first of those
    and its path is probable enough to be drafted."""

    tokens: Tensor
    count: Tensor
    total: Tensor
    alike: Tensor
    leads: Tensor

    @classmethod
    def of(cls, tokens: Tensor, weights: Tensor, least: float, depth: Tensor) -> Counted:
        """tokens [B, K, D] int64, negative where nothing followed; weights [B, K] float32, 0 for
        occurrences that do not count; least: the share of the total that a path needs; depth [B]:
        how deep at most."""
        tokens = tokens.transpose(1, 2)
        same = (tokens[..., None] == tokens[:, :, None]) & (tokens >= 0)[..., None]  # [B, D, K, K]
        counts = (weights > 0)[:, None, :, None] & (weights > 0)[:, None, None]
        alike = (same & counts).to(torch.uint8).cumprod(1, dtype=torch.uint8)
        count = (alike * weights[:, None, None]).sum(-1)
        total = weights.sum(1)
        numbers = torch.arange(tokens.shape[2], device=tokens.device)
        level = torch.arange(1, tokens.shape[1] + 1, device=tokens.device)[:, None]
        leads = (alike.argmax(-1) == numbers) & (count > 0)
        leads = leads & (count >= least * total[:, None, None]) & (level <= depth[:, None, None])
        return cls(tokens, count, total, alike.bool(), leads)

    @property
    def confidence(self) -> Tensor:
        """The share of the parent's weight that continues like each occurrence [B, D, K]."""
        first = self.total[:, None, None].expand_as(self.count[:, :1])
        above = torch.cat([first, self.count[:, :-1]], 1)
        return self.count / above.clamp(min=torch.finfo(above.dtype).tiny)


def fill_counted(plan: Plan, root: Tensor, counted: Counted) -> Proposal:
    """The most frequent continuations in the plan's shape; nodes for which there are none repeat
    `root` [B] with confidence 0.

    In static trees, the r-th child of a node is its r-th most frequent continuation. Dynamic trees
    hold the nodes of the most frequent paths of all, best first, up to the shape's number of nodes.
    Of equal counts the one with the better occurrence comes first.
    """
    if isinstance(plan, DynamicPlan):
        depth, chosen, alive, tree = _best_first(plan.shape, counted)
    else:
        assert isinstance(plan, TreePlan)
        depth, chosen, alive, tree = _by_rank(plan, counted)
    rows = torch.arange(root.shape[0], device=root.device)[:, None]
    tokens = torch.where(alive, counted.tokens[rows, depth - 1, chosen], root[:, None])
    confidence = torch.where(alive, counted.confidence[rows, depth - 1, chosen], 0.0)
    tokens = torch.cat([root[:, None], tokens], 1)
    confidence = torch.cat([torch.ones_like(confidence[:, :1]), confidence], 1)
    limit = torch.where(alive, depth, 0).amax(1)
    return Proposal(tokens, tree, confidence=confidence, limit=limit)


def _by_rank(plan: TreePlan, counted: Counted) -> tuple[Tensor, Tensor, Tensor, TokenTree]:
    """Drafted nodes' depths [1, N - 1], occurrences [B, N - 1], whether there are; the tree."""
    rows = torch.arange(counted.tokens.shape[0], device=counted.tokens.device)[:, None]
    parents = torch.zeros_like(rows)
    lives = torch.ones_like(parents, dtype=torch.bool)
    chosen, alive = [], []
    for level in plan.levels:
        place = level.depth - 1
        if level.rows is not None:
            parents, lives = parents[:, level.rows], lives[:, level.rows]
        free = counted.leads[:, place, None] & lives[..., None]  # [B, P, K]
        if place:
            free = free & counted.alike[rows, place - 1, parents]
        score = torch.where(free, counted.count[:, place, None], -1.0)
        parents, found = _best(score, level.max_rank + 1)
        parents, lives = parents.flatten(1), found.flatten(1)
        if level.pick is not None:
            parents, lives = parents[:, level.pick], lives[:, level.pick]
        chosen.append(parents)
        alive.append(lives)
    return plan.node_depth[None, 1:], torch.cat(chosen, 1), torch.cat(alive, 1), plan.tree


def _best(score: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Places [..., count] of the best of score [..., K], and whether they score above 0."""
    if count == 1:
        best = score.argmax(-1, keepdim=True)
        return best, score.gather(-1, best) > 0
    values, order = F.pad(score, (0, count), value=-1.0).sort(dim=-1, descending=True, stable=True)
    return order[..., :count].clamp(max=score.shape[-1] - 1), values[..., :count] > 0


def _best_first(shape: DynamicShape, counted: Counted) -> tuple[Tensor, Tensor, Tensor, TokenTree]:
    """As `_by_rank`, for the N - 1 nodes of the greatest counts. A node never has a greater count
    than its parent, and candidates are ordered by depth first, so of equal ones the parent comes
    first. Any such choice is therefore a tree."""
    occurrences = counted.tokens.shape[2]
    score = torch.where(counted.leads, counted.count, -1.0).flatten(1)  # [B, D * K]
    nodes = min(shape.nodes - 1, score.shape[1])
    order = score.sort(dim=1, descending=True, stable=True).indices[:, :nodes]
    alive = score.gather(1, order) > 0
    depth, chosen = order // occurrences + 1, order % occurrences
    rows = torch.arange(order.shape[0], device=order.device)[:, None]
    leader = counted.alike.to(torch.uint8).argmax(-1)  # [B, D, K]
    above = (depth - 2).clamp(min=0)
    wanted = above * occurrences + leader[rows, above, chosen]
    parent = (wanted[..., None] == order[:, None]).to(torch.uint8).argmax(-1) + 1
    parents = torch.where(alive & (depth > 1), parent, 0)
    parents = F.pad(parents, (1, 0))
    return depth, chosen, alive, TokenTree.from_parents(parents, shape.max_depth)
