"""Acceptance: which drafted nodes are the target's own picks.

The `match` rule: a node is accepted if its parent is accepted and its token is the target's pick at
the parent. The text is then the target's picks along one path, independent of the drafter, so it
equals decoding without a drafter with the same noise. Everything here has fixed shapes and needs no
host synchronisation.

Legend: B rows, N nodes, D the tree's deepest level.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from heads.api.tree import TokenTree


@dataclass
class Walk:
    """The accepted path of every row. Entries beyond `accepted` repeat the root (node 0).

    path [B, D+1] int64: node numbers (root first); accepted [B] int64: drafted tokens accepted;
    has_children [B] bool: whether drafted tokens were tested at the last node of the path (one of
    them was then rejected).
    """

    path: Tensor
    accepted: Tensor
    has_children: Tensor


def leading(good: Tensor) -> Tensor:
    """How many levels [B] int64 of good [B, D] bool come before the first bad one.

    It is computed as a minimum, not a product: compiled for a CPU, it becomes part of the kernel
    around it.
    """
    levels = good.shape[1]
    ends = torch.where(good, levels, torch.arange(levels, device=good.device))
    return F.pad(ends, (0, 1), value=levels).amin(1)


def children_lists(parents: list[int]) -> list[list[int]]:
    """The children of every node of a tree, in their order; the root is its own parent."""
    children: list[list[int]] = [[] for _ in parents]
    for node, parent in enumerate(parents):
        if node:
            children[parent].append(node)
    return children


def walk(tokens: Tensor, picks: Tensor, tree: TokenTree) -> Walk:
    """Follow the target's picks from the root. tokens, picks [B, N] int64 (drafted tokens; the
    target's choice at each node)."""
    if tree.is_chain:
        matched = tokens[:, 1:] == picks[:, :-1]
        accepted = leading(matched)
        path = torch.arange(tree.num_nodes, device=tokens.device).expand(tokens.shape[0], -1)
        return Walk(path, accepted, accepted < tree.max_depth)
    rows = tokens.shape[0]
    parents = tree.parents.expand(rows, -1)
    matched = tokens == picks.gather(1, parents)
    matched[:, 0].fill_(True)
    # [B, N]: every node on the way from the root matched
    reached = (matched[:, None, :] | ~tree.ancestors).all(-1)
    depth = torch.where(reached, tree.depth, -1)
    # of duplicates among siblings, the first one is walked
    last = depth.argmax(1)
    accepted = depth.gather(1, last[:, None])[:, 0]
    ancestors = tree.ancestors.expand(rows, -1, -1)
    on_path = ancestors[torch.arange(rows, device=tokens.device), last]
    # nodes off the path fall into a trash column
    places = torch.where(on_path, tree.depth, tree.max_depth + 1)
    path = torch.zeros(rows, tree.max_depth + 2, dtype=torch.int64, device=tokens.device)
    path.scatter_(1, places, torch.arange(tree.num_nodes, device=tokens.device).expand(rows, -1))
    is_parent = torch.zeros_like(parents, dtype=torch.bool).scatter_(1, parents[:, 1:], True)
    return Walk(path[:, : tree.max_depth + 1], accepted, is_parent.gather(1, last[:, None])[:, 0])
