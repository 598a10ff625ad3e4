"""The reference of tree attention in plain torch: slow and simple, used where no kernel runs.

Every node of a row's token tree sees the row's committed tokens and its own ancestors, itself
included. Keys and values are the whole preallocated buffers of a layer: row b's committed tokens
fill slots 0 .. lengths[b]-1, its node i is in slot lengths[b]+i, and slots beyond are never used.
Queries are those of all nodes, or of some: a drafter runs one level of its tree after the levels
that are in its cache.

Legend: B rows, N nodes, Q queries, S slots, W words, h key/value heads, G query heads per key/value
head, D head size, Dv value size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from heads.kernels.dispatch import FLOATS, Op


def tree_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    words: Tensor,
    depth: Tensor,
    *,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    at: Tensor | None = None,
    split_size: int = 256,
    invariant: bool = False,
) -> Tensor:
    """Attention of tree nodes over a slot-addressed cache -> [B, Q, h*G, Dv] in `query`'s dtype.

    query [B, h*G, Q, D]; keys [B, h, S, D] and values [B, h, S, Dv] of the same dtype, with the
    nodes' entries already written. lengths [B] int64: committed tokens; words [1|B, Q, W] int32:
    bits of the nodes that each query sees (`heads.api.tree.ancestor_words`), at least as many as
    there are nodes; depth [1|B, N] int64. at [1|B, Q] int64: the queries' depths; None: query i is
    node i. The score of a key is `scaling` * its product with the query, transformed by softcap *
    tanh(score / softcap) if `softcap` is given (Gemma 2). window: only keys less than `window`
    positions back are seen; a committed token's position is its slot, node j's is lengths +
    depth[j], query i's is lengths + at[i]. sinks [h*G]: a learned extra score per query head that
    takes weight but has no value (GPT-OSS). A query that sees nothing gets zeros. split_size: size
    of the pieces in which the kernel reads the cache; invariant: the kernel uses the same tiles for
    every number of nodes. Both affect only the kernel's rounding, not this reference.

    Computed in float32, or in float64 for float64 inputs.
    """
    rows, heads, queries, size = query.shape
    key_heads, slots, nodes = keys.shape[1], keys.shape[2], depth.shape[1]
    groups = heads // key_heads
    precise = torch.promote_types(query.dtype, torch.float32)
    seen = visible(lengths, words, depth, slots, window, at)
    written = (torch.arange(slots, device=keys.device) < lengths[:, None] + nodes)[:, None, :, None]
    # zero out unwritten slots, as a weight of 0 is not enough: 0 * NaN is NaN
    keys, values = (torch.where(written, x, x.new_zeros(())).to(precise) for x in (keys, values))
    packed = query.to(precise).reshape(rows, key_heads, groups, queries, size)
    scores = torch.einsum("bhgnd,bhsd->bhgns", packed, keys) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen[:, None, None], float("-inf"))
    peak = scores.amax(-1, keepdim=True)
    if sinks is not None:
        sink = sinks.to(precise).reshape(1, key_heads, groups, 1, 1)
        peak = torch.maximum(peak, sink)
    peak = torch.where(peak.isinf(), torch.zeros_like(peak), peak)
    weights = torch.exp(scores - peak)
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sink - peak)
    out = torch.einsum("bhgns,bhsd->bhgnd", weights, values) / torch.where(total > 0, total, 1)
    return out.reshape(rows, heads, queries, -1).transpose(1, 2).contiguous().to(query.dtype)


def visible(
    lengths: Tensor,
    words: Tensor,
    depth: Tensor,
    slots: int,
    window: int | None,
    at: Tensor | None = None,
) -> Tensor:
    """The slots, of S = `slots`, that each query sees, [B, Q, S] bool; see `tree_attention`."""
    nodes, queries = depth.shape[1], words.shape[1]
    slot = torch.arange(slots, device=lengths.device)
    node = slot - lengths[:, None]  # [B, S]: which node a slot holds; negative for committed tokens
    known = node.clamp(0, nodes - 1)
    word = (known // 32)[:, None].expand(-1, queries, -1)
    bits = words.expand(node.shape[0], -1, -1).gather(2, word)
    ancestor = (bits >> (known % 32)[:, None].to(torch.int32)) & 1 == 1
    committed = (node < 0)[:, None]
    seen = committed | (ancestor & (node < nodes)[:, None])
    if window is not None:
        positions = lengths[:, None] + depth
        key_positions = torch.where(node < 0, slot, positions.gather(1, known))
        own = positions if at is None else lengths[:, None] + at
        seen = seen & (key_positions[:, None] > own[:, :, None] - window)
    return seen


MOST_PARTS = 32
"""Most programs that share the cache of one head of a row: two per SM of an H100 at 8 heads."""


def parts_of(capacity: int, split_size: int = 256) -> int:
    """How many programs share a head's cache: one per split, at most `MOST_PARTS`."""
    return min(MOST_PARTS, -(-capacity // split_size))


def workspace_bytes(
    rows: int, heads: int, queries: int, value_dim: int, capacity: int, split_size: int = 256
) -> int:
    """Bytes of float32 scratch memory of one call of the kernel; layers reuse it."""
    return rows * heads * queries * parts_of(capacity, split_size) * (value_dim + 1) * 4


TREE_ATTENTION = Op(
    "tree_attention",
    tree_attention,
    "inference.kernels.tree_attention:tree_attention",
    FLOATS,
    cpp="inference.kernels.cpu_tree_attention:tree_attention",
)
