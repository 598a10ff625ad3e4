"""Recursive rejection of several candidates per node, drawn without replacement (SpecInfer,
2305.09781; without replacement as in Sequoia, 2402.12374). Chains and trees.

At a node with target distribution p and draft distribution q, the children are tried in the order
in which they were drawn. A child x is kept with probability min(1, p(x) / q(x)), and the walk
continues below it. Otherwise p becomes max(p - q, 0), q loses x, both are normalised, and the next
child is tried. If no child is kept, the next token is drawn from what is left of p. Children are
the best scores of log q plus Gumbel noise in descending order, which is drawing without
replacement.

Static trees are weighed in this way. In a dynamic tree, the scores of the drafts decide how many
siblings and descendants are drafted. Given the tree, a child no longer follows q, and weighing it
by q would be wrong. There the candidates are the drafter's best tokens without noise, and so
certain. They are judged as in EAGLE's code: a child is kept with probability p(x), otherwise p
loses x. This is equivalent to drawing from p and comparing the draw with the children (`match`, see
`inference.decoding.rules.weights`), which is the implementation.

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
from inference.decoding.rules.base import Rule, RuleOptions, Verdict
from inference.decoding.sampling.noise import SharedNoise


class SpecInfer(weights.TreeRule):
    """See the module."""

    name: ClassVar[str] = "specinfer"
    separate = False

    def __init__(self, shape: DraftShape) -> None:
        super().__init__(shape)
        if isinstance(shape, TokenTree):
            self._children, self._widths = children_of(shape)

    def weigh(
        self, proposal: Proposal, logits: Tensor, positions: Tensor, noise: SharedNoise
    ) -> Verdict:
        """See `TreeRule`. Only the nodes that the walk reaches are weighed, one per depth."""
        assert proposal.logits is not None and proposal.tree.num_nodes == self._children.shape[0]
        node = torch.zeros_like(proposal.tokens[:, 0])
        walking = torch.ones_like(node, dtype=torch.bool)
        refused = torch.zeros_like(walking)
        path, left, behind = [node], logits.new_zeros(()), node
        # nothing is tried after the deepest level
        for level, width in enumerate((*self._widths, 0)):
            p = noise.target_probabilities(weights.at_node(logits, node)[:, None])[:, 0]
            rest, position = p, positions.gather(1, node[:, None]) + 1
            found, child = torch.zeros_like(walking), node
            if width:
                children = self._children[node, :width]
                there = children > 0
                if proposal.limit is not None:
                    there = there & (level < proposal.limit)[:, None]
                drawn_from = weights.at_node(proposal.logits, node)[:, None]
                scores = noise.draft_logits(drawn_from, proposal.token_ids)[:, 0]
                tokens = proposal.tokens.gather(1, children)
                p_child, q_child, rest = tries(p, scores, tokens, there)
                coins = noise.uniforms(position, width)[:, 0]
                # strict: nothing with p = 0 is kept
                kept = walking[:, None] & (coins * q_child < p_child)
                found = kept.any(1)
                child = children.gather(1, kept.to(torch.int64).argmax(1, keepdim=True))[:, 0]
                refused = refused | (walking & there.any(1) & ~found)
            stops = walking & ~found
            left = torch.where(stops[:, None], rest, left)
            behind = torch.where(stops, position[:, 0], behind)
            node, walking = torch.where(found, child, node), found
            path.append(torch.where(found, child, 0))
        way = torch.stack(path[:-1], 1)
        accepted = (way > 0).sum(1)
        drafted, bonus = (
            proposal.tokens.gather(1, way[:, 1:]),
            weights.draw(left, left, behind, noise),
        )
        return Verdict(way, accepted, refused, weights.committed(drafted, accepted, bonus))


def tries(
    p: Tensor, scores: Tensor, tokens: Tensor, there: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Weigh the children of one node per row, each as if those before it had been rejected.

    p [B, V]: the target's distribution; scores [B, V]: log q up to a constant; tokens [B, K] of the
    children; there [B, K] bool: False if a node has fewer children. Returns p and q at each child
    [B, K] when it is tried, and what is left of p [B, V] after all of them. A missing child, and a
    child that was not drawn from what was left of q (a repeated token), has p = 0 and q = 1: it is
    rejected and changes nothing.
    """
    p_tried, q_tried = [], []
    for token, exists in zip(tokens.unbind(1), there.unbind(1), strict=True):
        at = token[:, None]
        q = scores.softmax(-1).nan_to_num(0.0)  # NaN: every token was tried
        q_token = q.gather(1, at)
        drawn = exists[:, None] & (q_token > 0)
        p_tried.append(torch.where(drawn, p.gather(1, at), 0.0))
        q_tried.append(torch.where(drawn, q_token, 1.0))
        left = (p - q).clamp(min=0)
        mass = left.sum(-1, keepdim=True)
        # nothing is left only if p = q, and then the child was kept, except for rounding
        p = torch.where(drawn & (mass > 0), left / torch.where(mass > 0, mass, 1.0), p)
        scores = torch.where(drawn, scores.scatter(1, at, float("-inf")), scores)
    return torch.cat(p_tried, 1), torch.cat(q_tried, 1), p


def children_of(tree: TokenTree) -> tuple[Tensor, tuple[int, ...]]:
    """The children of each node of a static tree, in node order, [N, K] int64 (0: none), on the
    tree's device; and the largest number of children of a node at each depth 0..D-1. Reads the tree
    on the host.
    """
    parents, depth = tree.parents[0].tolist(), tree.depth[0].tolist()
    children = children_lists(parents)
    widths = [0] * tree.max_depth
    for node, below in enumerate(children):
        if below:
            widths[depth[node]] = max(widths[depth[node]], len(below))
    most = max(widths, default=0)
    padded = [below + [0] * (most - len(below)) for below in children]
    table = torch.tensor(padded, dtype=torch.int64, device=tree.parents.device)
    return table.reshape(len(parents), most), tuple(widths)


def make(shape: DraftShape, options: RuleOptions) -> Rule:
    """The rule for drafts of `shape`."""
    return SpecInfer(shape)
