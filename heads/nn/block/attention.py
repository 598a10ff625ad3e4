"""Attention of block drafters in training: many blocks of one sequence at once.

A block stands behind a place t of the sequence, the last position whose true states it may see: its
queries attend to the context up to t within t's document, and to the block's own slots. Nothing of
another block and nothing behind t is visible (DFlash, 2602.06036). Two ways to compute the same:
exactly with dense scores (the CPU, float64), and with flex attention on CUDA, which skips what is
masked.

Legend: B rows, T positions, A blocks per row, b slots per block, h query heads, g key/value heads,
G = h / g, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

KeyValue = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Anchors:
    """Where the blocks of a batch stand.

    last [B, A] int64: the last visible position t of each block; its root is the token at t + 1.
    valid [B, A] bool: False for fillers of rows with fewer blocks. scale [B, A] float: what each
    block's loss is multiplied by, so that a sum over the chosen blocks is an estimate of the
    (weighted) sum over all eligible positions.
    """

    last: Tensor
    valid: Tensor
    scale: Tensor

    def piece(self, first: int, count: int) -> Anchors:
        """`count` blocks of every row from number `first` on."""
        span = slice(first, first + count)
        return Anchors(self.last[:, span], self.valid[:, span], self.scale[:, span])

    @classmethod
    def sample(
        cls,
        eligible: Tensor,
        most: int,
        generators: Sequence[torch.Generator],
        weights: Tensor | None = None,
    ) -> Anchors:
        """Up to `most` positions of every row where `eligible` [B, T] bool, drawn without
        repetition from each row's own generator and in ascending order. Reads the mask on the host;
        for training only.

        weights [B, T]: how much a block with its root at this position counts, the root of a block
        behind position t standing at t + 1; positions are drawn in proportion to that.
        """
        chosen, scales = [], []
        for number, (row, generator) in enumerate(zip(eligible.cpu(), generators, strict=True)):
            places = row.nonzero().squeeze(1)
            roots = (places + 1).clamp(max=row.shape[0] - 1)
            heavy = None if weights is None else weights[number].cpu()[roots]
            order, scale = draw(places.shape[0], most, generator, heavy)
            chosen.append(places[order])
            scales.append(scale)
        width = max(1, *(places.shape[0] for places in chosen))
        last, scale = (
            torch.stack([torch.nn.functional.pad(p, (0, width - p.shape[0])) for p in rows])
            for rows in (chosen, scales)
        )
        counts = torch.tensor([p.shape[0] for p in chosen])
        valid = torch.arange(width) < counts[:, None]
        device = eligible.device
        return cls(last.to(device), valid.to(device), scale.to(device))

    @classmethod
    def everywhere(cls, tokens: Tensor) -> Anchors:
        """A block behind every position of `tokens` [B, T]."""
        last = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        scale = torch.ones(tokens.shape, device=tokens.device)
        return cls(last, torch.ones_like(last, dtype=torch.bool), scale)


def draw(
    count: int, most: int, generator: torch.Generator, weights: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Numbers below `count`, at most `most` of them, ascending int64, and the scale [chosen]
    float32 that makes a sum over them an unbiased estimate of the sum over all, each times its
    weight.

    weights [count]: a number is drawn with a chance in proportion to its weight (at most 1), by
    systematic sampling in a random order; None, or all the same: every number with the same chance.
    """
    order = torch.randperm(count, generator=generator)
    if weights is None or count == 0 or bool((weights == weights[0]).all()):
        order = order[:most].sort().values
        factor = 1.0 if weights is None or count == 0 else float(weights[0])
        return order, torch.full(order.shape, factor * (count / max(1, order.shape[0])))
    chances = inclusion(weights.double(), most)
    ends = chances[order].cumsum(0)
    offset = torch.rand((), generator=generator, dtype=torch.float64)
    # A number is hit where its stretch of the sum holds one of the marks offset, offset + 1, ...
    hit = (ends - offset).ceil() > (ends - chances[order] - offset).ceil()
    order = order[hit].sort().values
    return order, (weights[order] / chances[order]).float()


def inclusion(weights: Tensor, most: int) -> Tensor:
    """Chances [count] in proportion to the weights, at most 1, that sum to `most` (or fewer)."""
    chances = torch.zeros_like(weights)
    sure = torch.zeros_like(weights, dtype=torch.bool)
    while True:
        rest = weights.masked_fill(sure, 0.0)
        left = most - int(sure.sum())
        if left <= 0 or float(rest.sum()) == 0.0:
            return torch.where(sure, torch.ones_like(chances), torch.zeros_like(chances))
        chances = torch.where(sure, torch.ones_like(rest), rest * (left / rest.sum()))
        over = chances > 1.0
        if not bool(over.any()):
            return chances
        sure |= over


@dataclass(frozen=True)
class View:
    """What the slots of some blocks see. visible [B, A, b, T] bool: the context, with 1 for b where
    all slots of a block see the same; causal: whether a slot sees only itself and earlier slots of
    its block; flex: the same as a block mask of flex attention, None for dense scores."""

    visible: Tensor
    causal: bool
    flex: Any = None

    @classmethod
    def of(
        cls, segments: Tensor, last: Tensor, slots: int, causal: bool, flex: bool, window: int = 0
    ) -> View:
        """segments [B, T]; last [B, A]; slots: b. flex: build the block mask too. window: positions
        that a slot sees of the context, counted from its own, besides the last one; 0: all."""
        places = torch.arange(segments.shape[1], device=segments.device)
        same = segments[:, None] == segments.gather(1, last)[..., None]  # [B, A, T]
        end = last[..., None, None]
        visible = same[:, :, None] & (places <= end)
        if window:
            stands = end + torch.arange(1, slots + 1, device=last.device)[:, None]  # [B, A, b, 1]
            visible = visible & ((places > stands - window) | (places == end))
        mask = _block_mask(visible, slots, causal) if flex else None
        return cls(visible, causal, mask)


def attend_blocks(query: Tensor, context: KeyValue, own: KeyValue, view: View) -> Tensor:
    """Attention of blocks: query [B, A, b, h, D], context keys and values [B, T, g, D], the blocks'
    own [B, A, b, g, D] -> [B, A, b, h * D]."""
    # The context's keys are shared by all blocks of a row and never copied.
    if view.flex is not None:
        return _flex(query, context, own, view.flex)
    blocks, slots, heads, size = query.shape[1:]
    kv_heads, length = context[0].shape[2], context[0].shape[1]
    groups = heads // kv_heads
    grouped = (query * size**-0.5).unflatten(3, (kv_heads, groups)).permute(0, 3, 1, 2, 4, 5)
    rows = grouped.flatten(3, 4)  # [B, g, A, b * G, D]
    past = rows.flatten(2, 3) @ context[0].permute(0, 2, 3, 1)  # [B, g, A * b * G, T]
    seen = view.visible
    seen = seen if seen.shape[2] == 1 else seen.repeat_interleave(groups, 2)
    past = past.unflatten(2, (blocks, slots * groups)).masked_fill(~seen[:, None], float("-inf"))
    inside = rows @ own[0].permute(0, 3, 1, 4, 2)  # [B, g, A, b * G, b]
    if view.causal:
        numbers = torch.arange(slots, device=query.device)
        later = numbers > numbers.repeat_interleave(groups)[:, None]  # [b * G, b]
        inside = inside.masked_fill(later, float("-inf"))
    scores = torch.cat([past, inside], -1)
    wide = torch.promote_types(scores.dtype, torch.float32)
    weights = scores.softmax(-1, dtype=wide).to(own[1].dtype)
    out = weights[..., :length].flatten(2, 3) @ context[1].transpose(1, 2)  # [B, g, A * b * G, D]
    out = out.unflatten(2, (blocks, slots * groups))
    out = out + weights[..., length:] @ own[1].permute(0, 3, 1, 2, 4)
    return out.unflatten(3, (slots, groups)).permute(0, 2, 3, 1, 4, 5).flatten(3)


# Flex attention


def _block_mask(visible: Tensor, slots: int, causal: bool) -> Any:
    """The block mask over [context, all blocks' slots] for visible [B, A, b or 1, T]."""
    batch, blocks, kinds, length = visible.shape

    def allowed(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        block = q // slots
        slot = q % slots if kinds > 1 else q * 0
        past = (kv < length) & visible[b, block, slot, kv.clamp(max=length - 1)]
        place = kv - length
        inside = (place >= 0) & (place // slots == block)
        return past | (inside & (place <= q)) if causal else past | inside

    size = blocks * slots
    return create_block_mask(allowed, batch, None, size, length + size, device=str(visible.device))


@cache
def _compiled() -> Callable[..., Any]:
    return torch.compile(flex_attention)


def _flex(query: Tensor, context: KeyValue, own: KeyValue, mask: Any) -> Tensor:
    """The same through flex attention: compiled on CUDA, else eager (forward pass only)."""
    blocks, slots = query.shape[1:3]
    pairs = zip(context, own, strict=True)
    key, value = (torch.cat([p, o.flatten(1, 2)], 1).transpose(1, 2) for p, o in pairs)
    run: Any = _compiled() if query.is_cuda else flex_attention
    rows = query.flatten(1, 2).transpose(1, 2).to(value.dtype)
    out: Tensor = run(rows, key.to(value.dtype), value, block_mask=mask, enable_gqa=True)
    return out.transpose(1, 2).unflatten(1, (blocks, slots)).flatten(3)
