"""Attention of drafters: packed sequences in training, a preallocated cache in decoding.

What queries see of a cache: `heads.nn.drafting.sight`.

Legend: B rows, T positions, Q queries, S cache slots, h query heads, g key/value heads, D head size
(of values, where they differ from keys, in what attention returns).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

CHUNK_ELEMENTS = 1 << 26
"""Most attention scores at once before queries are split into recomputed chunks."""


def packed_mask(segments: Tensor) -> Tensor | None:
    """[B, 1, T, T] bool: causal within equal segment numbers [B, T]; None when plain causal is the
    same.

    Padding attends to padding, so that no row is empty. Asks the device once; for training only.
    """
    if bool((segments == segments[:, :1]).all()):
        return None
    length = segments.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=segments.device).tril()
    return ((segments[:, :, None] == segments[:, None, :]) & causal)[:, None]


def sequence_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """Causal attention of a sequence over itself: query [B, T, h, D], key and value [B, T, g, D]
    -> [B, T, h * D]. mask [B, 1, T, T] bool replaces plain causality."""
    groups = query.shape[2] // key.shape[2]
    key, value = (states.transpose(1, 2).repeat_interleave(groups, 1) for states in (key, value))
    out = F.scaled_dot_product_attention(
        query.transpose(1, 2), key, value, attn_mask=mask, is_causal=mask is None
    )
    return out.transpose(1, 2).flatten(2)


def cache_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """Attention over cache slots: query [B, Q, h, D], key and value [B, S, g, D], mask [B, Q, S],
    added to the scores -> [B, Q, h * D].

    Queries that share a key/value head are laid side by side: the cache is never copied.
    """
    batch, queries, heads, size = query.shape
    kv_heads = key.shape[2]
    groups = heads // kv_heads
    # [B, Q, g, G, D] -> [B, g, G * Q, D]
    grouped = query.view(batch, queries, kv_heads, groups, size).permute(0, 2, 3, 1, 4)
    grouped = grouped.reshape(batch, kv_heads, -1, size)
    if queries > 1 and groups > 1:
        mask = mask[:, None].expand(batch, groups, queries, mask.shape[-1]).flatten(1, 2)
    out = F.scaled_dot_product_attention(
        grouped, key.transpose(1, 2), value.transpose(1, 2), attn_mask=mask[:, None]
    )
    out = out.view(batch, kv_heads, groups, queries, value.shape[-1]).permute(0, 3, 1, 2, 4)
    return out.reshape(batch, queries, -1)


def additive(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where allowed (bool), minus infinity elsewhere: the mask that attention adds."""
    zeros = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
    return zeros.masked_fill_(~allowed, float("-inf"))


def chained_attention(
    query: Tensor, keys: list[Tensor], values: list[Tensor], mask: Tensor | None
) -> Tensor:
    """Attention of a later step of a training-time test (EAGLE-3, 2503.01840) -> [B, T, h * D].

    query [B, T, h, D] at step k; keys[0], values[0] [B, T, g, D] are step 0's: seen causally (or by
    `mask` [B, 1, T, T]); keys[j] of steps 1..k: row t sees row t only, its own chain. Equal to one
    softmax over all those columns; the later steps add one column each instead of a [T, T] block.
    """
    if len(keys) == 1:
        return sequence_attention(query, keys[0], values[0], mask)
    batch, length, heads, size = query.shape
    kv_heads = keys[0].shape[2]
    grouped = query.view(batch, length, kv_heads, heads // kv_heads, size) * size**-0.5
    # [B, T, g, G, k]
    own = torch.stack([(grouped * key[:, :, :, None]).sum(-1) for key in keys[1:]], -1)
    own_values = torch.stack(values[1:], 3)  # [B, T, g, k, D]
    chunk = max(1, CHUNK_ELEMENTS // (batch * heads * length))

    def part(span: slice) -> Tensor:
        allowed = None if mask is None else mask[:, :, span, : span.stop]
        seen = keys[0][:, : span.stop], values[0][:, : span.stop]
        return chained_rows(grouped[:, span], own[:, span], own_values[:, span], *seen, allowed)

    return in_chunks(part, length, chunk).flatten(2)


def in_chunks(part: Callable[[slice], Tensor], rows: int, chunk: int) -> Tensor:
    """part(rows) for all of `rows` rows, side by side in the second dimension; `chunk` rows at a
    time, recomputed in the backward pass, if there are more."""
    if rows <= chunk:
        return part(slice(0, rows))
    spans = [slice(first, min(first + chunk, rows)) for first in range(0, rows, chunk)]
    pieces: list[Tensor] = [checkpoint(part, span, use_reentrant=False) for span in spans]
    return torch.cat(pieces, 1)


def chained_rows(
    grouped: Tensor,
    own: Tensor,
    own_values: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
) -> Tensor:
    """The last Q rows of a sequence of E: grouped [B, Q, g, G, D], own [B, Q, g, G, k], own_values
    [B, Q, g, k, D], key and value [B, E, g, D], mask [B, 1, Q, E] -> [B, Q, h, D]."""
    batch, queries, kv_heads, groups, _ = grouped.shape
    end = key.shape[1]
    # [B, g, Q * G, D] @ [B, g, D, E]: the heads of a group share one matrix product.
    scores = grouped.transpose(1, 2).flatten(2, 3) @ key.permute(0, 2, 3, 1)
    if mask is None:
        rows = torch.arange(end - queries, end, device=key.device)
        mask = (rows[:, None] >= torch.arange(end, device=key.device))[None, None]
    scores = scores.view(batch, kv_heads, queries, groups, end).masked_fill(
        ~mask[:, :, :, None], float("-inf")
    )
    all_scores = torch.cat([scores, own.transpose(1, 2)], -1)
    weights = all_scores.softmax(-1, dtype=torch.promote_types(all_scores.dtype, torch.float32)).to(
        value.dtype
    )
    context = weights[..., :end].flatten(2, 3) @ value.transpose(1, 2)  # [B, g, Q * G, D]
    chain = weights[..., end:] @ own_values.transpose(1, 2)  # [B, g, Q, G, D]
    out = context.view(batch, kv_heads, queries, groups, value.shape[-1]) + chain
    return out.transpose(1, 2).flatten(2, 3)
