"""Causal attention over long texts with memory linear in their length.

A text of one document, read at once, is plain causal attention, which libraries compute without a
mask. So is the later part of a prompt whose beginning is in the cache, where torch has a kernel for
it (flash attention on a GPU). Windows, chunks, soft-capping, sinks, and later parts elsewhere need
a mask. For these, queries are computed `BLOCK` at a time, each block over the keys that some of its
queries see, with a mask of that size. Packed rows are computed document by document.

Legend: B rows, N queries, S keys, D head size, h key/value heads, G query heads per key/value head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from heads.nn.attention import additive
from heads.nn.packing import Document

BLOCK = 256
"""Queries whose mask is built at once."""
Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""Packed queries [B, h, G*N, D], keys, values [B, h, S, ..] and an additive mask [1, 1, G*N, S] or
None -> [B, h, G*N, Dv]."""


@dataclass(frozen=True)
class Sight:
    """Further limits of a causal layer: it sees `window` positions back, and only its own chunk of
    `chunk` positions."""

    window: int | None = None
    chunk: int | None = None

    def first(self, position: int) -> int:
        """The first position that is visible from `position`."""
        first = 0 if self.window is None else max(0, position - self.window + 1)
        return first if self.chunk is None else max(first, position // self.chunk * self.chunk)

    def is_plain(self, begin: int, end: int) -> bool:
        """Whether each of the positions [begin, end) sees all positions from `begin` to itself."""
        return self.first(end - 1) <= begin


def causal_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sight: Sight,
    attend: Attend | None,
    begin: int = 0,
    scaling: float | None = None,
) -> Tensor:
    """Attention of the last N of S positions: query [B, h*G, N, D], key, value [B, h, S, ..] ->
    [B, N, h*G, Dv].

    attend: computes attention with a mask; None: torch's attention, without a mask if possible.
    begin: the position of the first key.
    """
    batch, heads, nodes, size = query.shape
    key_heads, keys = key.shape[1], key.shape[2]
    groups, behind = heads // key_heads, keys - nodes
    if attend is None and sight.is_plain(begin, begin + keys):
        fused = _is_fused(query, key, value)
        if behind == 0 or fused:
            return _plain(query, key, value, fused, scaling)

    def by_mask(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
        return scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scaling)

    parts = []
    for first in range(0, nodes, BLOCK):
        stop = min(first + BLOCK, nodes)
        low = max(0, sight.first(begin + behind + first) - begin)
        high = behind + stop
        rows = torch.arange(behind + first, high, device=query.device)[:, None]
        columns = torch.arange(low, high, device=query.device)
        allowed = columns <= rows
        if sight.window is not None:
            allowed = allowed & (columns > rows - sight.window)
        if sight.chunk is not None:
            chunk = sight.chunk
            allowed = allowed & ((begin + columns) // chunk == (begin + rows) // chunk)
        bias = additive(allowed, query.dtype).repeat(groups, 1)[None, None]
        # queries of one group become extra rows, so that no key or value is copied
        packed = query[:, :, first:stop].reshape(batch, key_heads, groups * (stop - first), size)
        seen = key[:, :, low:high], value[:, :, low:high]
        out = (attend or by_mask)(packed, *seen, bias)
        parts.append(out.reshape(batch, heads, stop - first, value.shape[-1]).transpose(1, 2))
    return torch.cat(parts, 1)


def _is_fused(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether torch computes causal attention of the last positions without a mask: with flash
    attention on a GPU. Elsewhere it would build a mask of all queries and keys."""
    if query.device.type != "cuda":
        return False
    shared = query.shape[1] != key.shape[1]
    return can_use_flash_attention(SDPAParams(query, key, value, None, 0.0, False, shared))


def _plain(query: Tensor, key: Tensor, value: Tensor, fused: bool, scaling: float | None) -> Tensor:
    """Attention of the last N of S positions, each over all positions up to its own, without a
    mask: as `causal_attention`."""
    nodes, keys, groups = query.shape[2], key.shape[2], query.shape[1] // key.shape[1]
    # Other kernels for a GPU (float32) take one key head per query head, or write out all scores.
    shares = groups > 1 and (fused or query.device.type == "cpu")
    if groups > 1 and not shares:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    more: dict[str, Any] = {"scale": scaling, "enable_gqa": shares}
    if nodes == keys:
        out = scaled_dot_product_attention(query, key, value, is_causal=True, **more)
    else:
        out = scaled_dot_product_attention(
            query, key, value, attn_mask=causal_lower_right(nodes, keys), **more
        )
    return out.transpose(1, 2).contiguous()


def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sight: Sight,
    attend: Attend | None,
    lying: Sequence[Document],
    scaling: float | None = None,
) -> Tensor:
    """`causal_attention` of packed rows, document by document. The documents `lying` cover all
    places in order."""
    rows: list[list[Tensor]] = [[] for _ in range(query.shape[0])]
    for one in lying:
        at = slice(one.row, one.row + 1), slice(None), slice(one.first, one.end)
        given = query[at], key[at], value[at], sight, attend
        rows[one.row].append(causal_attention(*given, begin=one.begin, scaling=scaling))
    return torch.cat([torch.cat(parts, 1) for parts in rows])
