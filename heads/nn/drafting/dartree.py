"""DARTree (2608.13524): a tree that grows autoregressively from the slots of one drafting pass.

The pass gives every depth a distribution that is independent of the tokens drafted above it. The k
best tokens of a depth are its candidates, for every path. The tree grows level by level: the W
nodes of a level offer all candidates of the next depth as children, scored by

    s(child) = s(parent) + log q(child | path),

and the W best of these W * k children are the next level. With a dependency, q is the
distribution over the candidates given the path; all other tokens are never scored, so a level costs
W * k numbers and not W vocabularies. Without one, q is the slot's own distribution. When all levels
have grown, the N - 1 nodes of greatest

    s - penalty * depth

are verified. The sum of exp(s) over the drafted nodes is the length that the drafter expects to be
accepted, so a penalty of 0 maximises it over the grown nodes; with W >= N - 1 no other tree of
these candidates is expected to do better. A drafter's confidence in a path exceeds the target's
acceptance more and more with depth. The penalty divides the odds of every level by exp(penalty) and
moves nodes from deep paths to shallow siblings. No node scores above its parent, so the best nodes
are a tree.

Above temperature 0 scores are log q + noise, normalised likewise (`Ranking.PERTURBED`). Shapes are
fixed and nothing synchronises with the device. The drafts count as certain, like those of dynamic
trees (`inference.decoding.rules.specinfer` says why), so their distributions are not kept.

Legend: B rows, N nodes, D deepest level, W nodes per level, P nodes of the level above, k
candidates per depth, C size of a dependency's carry, V' draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from heads.api.drafter import Noise, Proposal
from heads.api.tree import DartreeShape
from heads.nn.drafting.selection import keep_best
from heads.nn.drafting.state import Rooted

Along = Callable[[int, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""The effect of paths: (depth of the children, columns [B, k] of its candidates, the parents'
tokens [B, P], the carry [B, P, C] before these) -> addition to the candidates' logits [B, P, k], or
[B, 1, k] if it is the same for all parents, and the carry [B, P, C] after the parents."""


def grow_from_pass(
    shape: DartreeShape,
    state: Rooted,
    logits: Tensor,
    noise: Noise,
    token_ids: Tensor | None,
    along: Along | None = None,
    carry: Tensor | None = None,
    columns: Tensor | None = None,
) -> Proposal:
    """Draft behind the rows' roots from logits [B, D, V'] of every depth 1..D.

    token_ids [V'] maps columns to target ids when the draft vocabulary is reduced. along, carry [B,
    1, C]: the dependency, and its carry before the root; None: slots are independent. columns [B,
    D, k] int64: the candidates, if the dependency has only these; None: the best of each depth.
    """
    root = state.root[:, None]
    ahead = torch.arange(1, logits.shape[1] + 1, device=root.device)
    scores = noise.scores(logits, state.root_position[:, None] + ahead, token_ids)  # [B, D, V']
    if columns is None:
        columns = scores.topk(min(shape.candidates, scores.shape[-1]), -1).indices
    own = scores.gather(-1, columns)
    if along is None:
        own = own - scores.logsumexp(-1, keepdim=True)
    tokens = columns if token_ids is None else token_ids[columns]
    count, size = columns.shape[-1], 1
    # of the last level [B, P]: scores, tokens, numbers among all nodes
    total, drafted, number = torch.zeros_like(own[:, 0, :1]), root, torch.zeros_like(root)
    ranked, grown, parents = [total + torch.inf], [root], [number]
    for depth in range(1, shape.max_depth + 1):
        gains = own[:, depth - 1, None]  # [B, 1, k]
        if along is not None:
            assert carry is not None
            added, carry = along(depth, columns[:, depth - 1], drafted, carry)
            gains = (gains + noise.tempered(added)).log_softmax(-1)
        offered = (total[..., None] + gains.clamp(max=0.0)).flatten(1)
        total, place = offered.topk(min(shape.width, offered.shape[1]), 1)
        parent = place // count
        drafted = tokens[:, depth - 1].gather(1, place % count)
        if carry is not None:
            carry = carry.gather(1, parent[..., None].expand(-1, -1, carry.shape[-1]))
        parents.append(number.gather(1, parent))
        ranked.append(total - shape.depth_penalty * depth)
        grown.append(drafted)
        number = (size + torch.arange(total.shape[1], device=root.device)).expand_as(parent)
        size += total.shape[1]
    found, chosen, above = (torch.cat(parts, 1) for parts in (ranked, grown, parents))
    chosen, tree, _ = keep_best(found, chosen, above, shape.nodes, shape.max_depth)
    return Proposal(chosen, tree, token_ids=token_ids)
