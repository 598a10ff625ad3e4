"""Decayed sums over what precedes a place, with one decay per head: the output of a state of
rank-one terms for a query (`inference.target.recurrent.states`).

Legend: B rows, h heads, N nodes of a tree or tokens of a prompt, k and v key and value size.
"""

from __future__ import annotations

from torch import Tensor


def decay_between(total: Tensor, before: Tensor) -> Tensor:
    """e^{G_i - G_j} if j is i or precedes it, otherwise 0: [B, h, N, N], from total [B, h, N, 1]
    and before [1|B, 1, N, N]. The mask is applied before the exponential, which could overflow at
    masked entries."""
    gap = total - total.transpose(-1, -2)
    return gap.masked_fill(~before, float("-inf")).exp()


def weighted_sums(
    state: Tensor, queries: Tensor, keys: Tensor, values: Tensor, total: Tensor, before: Tensor
) -> Tensor:
    """q_i^T (e^{G_i} S + sum over j, i itself or before it, of e^{G_i - G_j} k_j v_j^T):
    [B, h, N, v], from state [B, h, k, v], queries, keys [B, h, N, k], values [B, h, N, v] and, as
    in `decay_between`, total and before."""
    weights = queries @ keys.transpose(-1, -2) * decay_between(total, before)
    return (queries * total.exp()) @ state + weights @ values
