"""Block verification of trees, from the leaves to the root (Traversal Verification, Weng et al.,
2505.12398). On chains it is block verification (Sun et al., 2403.10444).

Every node has a share: how much of the drafts' mass on the path to it the target grants. With p and
q the target's and the drafter's distribution at a node of share s, and s_root = 1:

    s_x = min(1, s p(x) / q(x))                  for a child x that is tried

The subtree of x is judged first. If nothing in it is kept, x itself is kept with probability s_x.
If x is not kept either, the node continues as if x had never been drafted:

    S = sum_y max(s p(y) - q(y), 0)
    s <- S / (S + 1 - s),   p <- max(s p - q, 0) / S,   q <- q without x, normalised

Then its next child is tried and, after the last child, the node itself. The first node that is kept
ends the path, and the next token is drawn from its p. A rule that goes from the root to the leaves
drops the subtree of a rejected node; here the subtree is judged before the node.

The children of several nodes of one depth are judged in one pass, so their noise must differ
(`Rule.separate`). Children are drawn without replacement. Dynamic trees and certain drafts are
judged by `match`, for the reasons given in `inference.decoding.rules.specinfer`.

Legend: B rows, N nodes, D the tree's deepest level, K children per node at most, V vocabulary.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from heads.api.drafter import Proposal
from heads.api.tree import DraftShape, TokenTree
from inference.decoding.rules import weights
from inference.decoding.rules.accept import children_lists
from inference.decoding.rules.base import Rule, RuleOptions, Verdict, tested
from inference.decoding.sampling.noise import SharedNoise


class Traversal(weights.TreeRule):
    """See the module."""

    name: ClassVar[str] = "traversal"
    separate = True

    def __init__(self, shape: DraftShape) -> None:
        super().__init__(shape)
        if isinstance(shape, TokenTree):
            self._children, self._depth, self._paths = read(shape)
            device = shape.parents.device
            column = [self._depth[:n].count(depth) for n, depth in enumerate(self._depth)]
            self._columns = max(column) + 1
            # [1, N, 1]: a node's number among those of its depth
            self._column = torch.tensor(column, device=device)[None, :, None]
            self._inner = torch.tensor([bool(below) for below in self._children], device=device)

    def weigh(
        self, proposal: Proposal, logits: Tensor, positions: Tensor, noise: SharedNoise
    ) -> Verdict:
        """See `TreeRule`."""
        walk = _Walk(self, proposal, logits, positions, noise)
        walk.visit(0)
        walk.keep(0, torch.ones_like(walk.found))
        kept, depth = walk.kept, proposal.tree.depth[0]
        accepted = depth[kept]
        path = self._paths[kept]
        refused = tested(self._inner[kept], accepted, proposal)
        bonus = weights.draw(walk.left, walk.left, weights.at_node(positions, kept) + 1, noise)
        drafted = proposal.tokens.gather(1, path[:, 1:])
        return Verdict(path, accepted, refused, weights.committed(drafted, accepted, bonus))


class _Walk:
    """The state of one verification: each node's p [B, V], scores log q [B, V] and share [B], after
    the children tried so far. found [B] bool: whether a node was kept; kept [B] int64: the node
    that ended the path; left [B, V]: its p."""

    def __init__(
        self,
        rule: Traversal,
        proposal: Proposal,
        logits: Tensor,
        positions: Tensor,
        noise: SharedNoise,
    ) -> None:
        assert proposal.logits is not None and proposal.tree.num_nodes == len(rule._children)
        self.rule, self.proposal = rule, proposal
        self.p = target = noise.target_probabilities(logits)
        self.scores = noise.draft_logits(proposal.logits, proposal.token_ids)
        coins = noise.uniforms(positions, rule._columns)
        self.coins = coins.gather(2, rule._column.expand(len(coins), -1, 1))[..., 0]
        self.nodes: dict[int, tuple[Tensor, Tensor]] = {}
        self.found = torch.zeros_like(proposal.tokens[:, 0], dtype=torch.bool)
        self.kept = torch.zeros_like(proposal.tokens[:, 0])
        self.left = target[:, 0]

    def visit(self, node: int, share: Tensor | None = None) -> None:
        """Judge everything below `node`, which has `share` [B] (None: 1), and store its p and share
        in `nodes`."""
        p, scores = self.p[:, node], self.scores[:, node]
        share = torch.ones_like(p[:, 0]) if share is None else share
        for child in self.rule._children[node]:
            token = self.proposal.tokens[:, child, None]
            q = scores.softmax(-1).nan_to_num(0.0)  # NaN: every token was tried
            p_child, q_child = p.gather(1, token)[:, 0], q.gather(1, token)[:, 0]
            drawn = q_child > 0
            if self.proposal.limit is not None:
                drawn = drawn & (self.rule._depth[child] <= self.proposal.limit)
            mass = share * p_child
            whole = drawn & (mass >= q_child) & (mass > 0)
            granted = torch.where(whole, 1.0, mass / torch.where(whole | ~drawn, 1.0, q_child))
            self.visit(child, torch.where(drawn, granted, 0.0))
            self.keep(child, drawn)
            # as if the child had never been drafted
            left = (share[:, None] * p - q).clamp(min=0)
            rest = left.sum(-1)
            total = rest + (1 - share)
            # 0 / 0 means s = 1 and p = q: the child was kept
            fallen = torch.where(total > 0, rest / torch.where(total > 0, total, 1.0), 1.0)
            some = drawn & (rest > 0)
            p = torch.where(some[:, None], left / torch.where(some, rest, 1.0)[:, None], p)
            share = torch.where(drawn, fallen, share)
            without = scores.scatter(1, token, float("-inf"))
            scores = torch.where(drawn[:, None], without, scores)
        self.nodes[node] = p, share

    def keep(self, node: int, possible: Tensor) -> None:
        """Keep `node`, by its coin, in rows where nothing was kept yet; the root is always kept."""
        p, share = self.nodes[node]
        passed = possible & ~self.found
        if node:
            passed = passed & (self.coins[:, node] < share)  # strict: nothing of share 0
        self.found = self.found | passed
        self.kept = torch.where(passed, node, self.kept)
        self.left = torch.where(passed[:, None], p, self.left)


def read(tree: TokenTree) -> tuple[list[list[int]], list[int], Tensor]:
    """Read a static tree. Returns each node's children in order and its depth, on the host, and the
    paths [N, D+1] int64 to the nodes, root first, 0 beyond, on the tree's device."""
    parents, depth = tree.parents[0].tolist(), tree.depth[0].tolist()
    children = children_lists(parents)
    paths = torch.zeros(len(parents), tree.max_depth + 1, dtype=torch.int64)
    for node in range(1, len(parents)):
        paths[node] = paths[parents[node]]
        paths[node, depth[node]] = node
    return children, depth, paths.to(tree.parents.device)


def make(shape: DraftShape, options: RuleOptions) -> Rule:
    """The rule for drafts of `shape`."""
    return Traversal(shape)
