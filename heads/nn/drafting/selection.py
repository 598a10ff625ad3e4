"""Selection of a tree's nodes from many scored candidates.

Legend: B rows, C candidates (the root included), N nodes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from heads.api.tree import TokenTree


def keep_best(
    scores: Tensor, tokens: Tensor, parents: Tensor, nodes: int, max_depth: int
) -> tuple[Tensor, TokenTree, Tensor]:
    """The `nodes` best of C candidates, all if there are fewer -> their tokens [B, N], the tree,
    and their numbers among the candidates [B, N] int64, ascending.

    scores [B, C] float, tokens and parents [B, C] int64 (parents as numbers of candidates).
    Candidate 0 is the root, which must score highest; no candidate may score above its parent,
    which has a lower number. Of equal scores the lower number is kept, so that every choice is a
    tree.
    """
    order = scores.sort(dim=1, descending=True, stable=True).indices
    kept = order[:, :nodes].sort(dim=1).values
    is_kept = torch.zeros_like(order, dtype=torch.bool).scatter_(1, kept, True)
    node = is_kept.cumsum(1) - 1  # of every kept candidate
    above = node.gather(1, parents.gather(1, kept))
    return tokens.gather(1, kept), TokenTree.from_parents(above, max_depth), kept
