"""Attention of drafters: packed sequences in training, a preallocated cache in decoding.

In training no tensor is as large as the square of a row: packed rows are attended to stretch by
stretch (`heads.nn.packing`). Where scores are written out, as for columns that belong to a single
row, they are computed again in the backward pass if there are more than `CHUNK_ELEMENTS`. For what
queries see of a cache, see `heads.nn.drafting.sight`.

Legend: B rows, T positions, Q queries, S keys or cache slots, R rows and n places of a stretch, h
query heads, g key/value heads, G = h / g, D head size (of values, where they differ from keys, in
what attention returns).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from heads.nn.packing import Packing, Stretch

CHUNK_ELEMENTS = 1 << 26
"""Most attention scores at once before queries are split into recomputed chunks."""


def sequence_attention(query: Tensor, key: Tensor, value: Tensor, packing: Packing) -> Tensor:
    """Causal attention of packed sequences over themselves: query [B, T, h, D], key and value [B,
    T, g, D] -> [B, T, h * D]."""
    return by_stretch(_stretch_attention, packing, query, key, value)


def _stretch_attention(stretch: Stretch, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return masked_attention(query, key, value, stretch.mask)


def masked_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """Attention of Q queries [B, Q, h, D] over S keys and values [B, S, g, D] -> [B, Q, h * D].
    mask [B, 1, Q, S] bool; None: plain causal, with Q = S."""
    groups = query.shape[2] // key.shape[2]
    key, value = (states.transpose(1, 2).repeat_interleave(groups, 1) for states in (key, value))
    out = F.scaled_dot_product_attention(
        query.transpose(1, 2), key, value, attn_mask=mask, is_causal=mask is None
    )
    return out.transpose(1, 2).flatten(2)


def by_stretch(part: Callable[..., Tensor], packing: Packing, *parts: Tensor) -> Tensor:
    """part(stretch, *the parts' slices in it [R, n, ..]) -> [R, n, ..] for all stretches of `parts`
    [B, T, ..], concatenated to [B, T, ..]."""
    if packing.whole is not None:
        return part(packing.whole, *parts)
    return _one_by_one(part, packing, *parts)


@torch.compiler.disable
def _one_by_one(part: Callable[..., Tensor], packing: Packing, *parts: Tensor) -> Tensor:
    """`by_stretch` for several stretches. Not compiled: every batch has other stretches, and would
    get a separate program."""
    sizes = [stretch.rows * stretch.length for stretch in packing.stretches]
    # The gradients of a split are concatenated once; those of slices would be summed as whole rows.
    split = [states.flatten(0, 1).split(sizes) for states in parts]
    found = []
    for stretch, *own in zip(packing.stretches, *split, strict=True):
        shape = stretch.rows, stretch.length
        found.append(part(stretch, *(each.unflatten(0, shape) for each in own)).flatten(0, 1))
    return torch.cat(found).unflatten(0, parts[0].shape[:2])


def cache_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """Attention over cache slots: query [B, Q, h, D], key and value [B, S, g, D], mask [B, Q, S],
    added to the scores -> [B, Q, h * D].

    Queries that share a key/value head are placed side by side, so the cache is never copied.
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
    query: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    packing: Packing,
    limit: int | None = None,
) -> Tensor:
    """Attention of a later step of a training-time test (EAGLE-3, 2503.01840) -> [B, T, h * D].

    query [B, T, h, D] at step k; keys[0], values[0] [B, T, g, D] are step 0's: seen causally within
    documents, the latest `limit` of them (None: all); keys[j] of steps 1..k: row t sees row t only,
    its own chain. Equal to one softmax over all those columns; the later steps add one column each
    instead of a [T, T] block.
    """
    if len(keys) == 1:
        return sequence_attention(query, keys[0], values[0], packing)
    grouped = query.unflatten(2, (keys[0].shape[2], -1)) * query.shape[-1] ** -0.5
    # [B, T, g, G, k]
    own = torch.stack([(grouped * key[:, :, :, None]).sum(-1) for key in keys[1:]], -1)
    own_values = torch.stack(list(values[1:]), 3)  # [B, T, g, k, D]
    # by the size that rows may have, not these rows, so that memory does not depend on documents
    recompute = query.shape[:3].numel() * query.shape[1] > CHUNK_ELEMENTS
    part = partial(_chained_stretch, limit, recompute)
    return by_stretch(part, packing, grouped, own, own_values, keys[0], values[0])


def _chained_stretch(
    limit: int | None,
    recompute: bool,
    stretch: Stretch,
    grouped: Tensor,
    own: Tensor,
    own_values: Tensor,
    key: Tensor,
    value: Tensor,
) -> Tensor:
    """The rows of one stretch: grouped [R, n, g, G, D] and so on -> [R, n, h * D]."""
    heads = grouped.shape[2] * grouped.shape[3]

    def rows(span: slice) -> Tensor:
        first = 0 if limit is None else min(max(0, span.start - limit + 1), span.start)
        seen = _seen(stretch, span, first, limit, key.device)
        past = key[:, first : span.stop], value[:, first : span.stop]
        return chained_rows(grouped[:, span], own[:, span], own_values[:, span], *past, seen)

    chunk = max(1, CHUNK_ELEMENTS // (stretch.rows * heads * stretch.length))
    return in_chunks(rows, stretch.length, chunk, recompute)


def _seen(
    stretch: Stretch, span: slice, first: int, limit: int | None, device: torch.device
) -> Tensor:
    """[R or 1, 1, Q, S] bool: which places from `first` to its end the rows of `span` see."""
    rows = torch.arange(span.start, span.stop, device=device)[:, None]
    columns = torch.arange(first, span.stop, device=device)
    if stretch.mask is None:
        seen = (columns <= rows)[None, None]
    else:
        seen = stretch.mask[:, :, span, first : span.stop]
    return seen if limit is None else seen & (columns > rows - limit)


def in_chunks(
    part: Callable[[slice], Tensor], rows: int, chunk: int, recompute: bool = False
) -> Tensor:
    """part(rows) for all of `rows` rows, side by side in the second dimension. If there are more
    than `chunk`, or with `recompute`, `chunk` rows at a time, recomputed in the backward pass."""
    if rows <= chunk and not recompute:
        return part(slice(0, rows))
    spans = [slice(first, min(first + chunk, rows)) for first in range(0, rows, chunk)]
    pieces: list[Tensor] = [
        checkpoint(part, span, use_reentrant=False, preserve_rng_state=False) for span in spans
    ]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, 1)


def chained_rows(
    grouped: Tensor, own: Tensor, own_values: Tensor, key: Tensor, value: Tensor, seen: Tensor
) -> Tensor:
    """Attention of Q rows over S places and over k columns of each row: grouped [B, Q, g, G, D],
    own [B, Q, g, G, k], own_values [B, Q, g, k, D], key and value [B, S, g, D], seen [B or 1, 1, Q,
    S] bool -> [B, Q, h * D]."""
    batch, queries, kv_heads, groups, _ = grouped.shape
    end = key.shape[1]
    # [B, g, Q * G, D] @ [B, g, D, S]: the heads of a group share one matrix product.
    scores = grouped.transpose(1, 2).flatten(2, 3) @ key.permute(0, 2, 3, 1)
    scores = scores.view(batch, kv_heads, queries, groups, end).masked_fill(
        ~seen[:, :, :, None], float("-inf")
    )
    all_scores = torch.cat([scores, own.transpose(1, 2)], -1)
    weights = all_scores.softmax(-1, dtype=torch.promote_types(all_scores.dtype, torch.float32)).to(
        value.dtype
    )
    context = weights[..., :end].flatten(2, 3) @ value.transpose(1, 2)  # [B, g, Q * G, D]
    chain = weights[..., end:] @ own_values.transpose(1, 2)  # [B, g, Q, G, D]
    out = context.view(batch, kv_heads, queries, groups, value.shape[-1]) + chain
    return out.transpose(1, 2).flatten(2)
