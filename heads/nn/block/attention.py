"""Attention of block drafters in training: many blocks of one sequence at once.

A block is anchored at a place t of the sequence, the last position whose true states it may see:
its queries attend to the context up to t within t's document, and to the block's own slots. Other
blocks and positions after t are not visible (DFlash, 2602.06036). There are two ways to compute
this: exactly with dense scores (the CPU, float64, few queries), and with flex attention on CUDA,
which skips masked scores. On the CPU, blocks that lie close together have dense scores with the
part of the context that they see, so that most pairs of different documents are not computed.

Legend: B rows, T positions, A blocks per row, b slots per block, h query heads, g key/value heads,
G = h / g, D head size; of a run: R = 1 row, N blocks, S positions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils._python_dispatch import _disable_current_modes, is_in_torch_dispatch_mode

KeyValue = tuple[Tensor, Tensor]

LEAST_QUERIES = 128
"""Queries of a row from which flex attention pays off: the side of its tiles. For fewer, torch uses
another kernel, which it cannot build for every shape."""
MOST_HIDDEN = 1 << 10
"""Pairs of a block and a position of the context, of those that a run computes, that may be hidden
from each other. By estimate they cost about as much as the operations of another run on a CPU."""


@dataclass(frozen=True)
class Run:
    """Blocks of a row, one after the other, and the positions of the context that they see."""

    row: int
    blocks: slice
    places: slice

    @property
    def count(self) -> int:
        """Number of blocks."""
        return int(self.blocks.stop - self.blocks.start)


@dataclass(frozen=True)
class View:
    """What the slots of some blocks see. visible [B, A, b, T] bool: the context, with 1 for b if
    all slots of a block see the same; causal: whether a slot sees only itself and earlier slots of
    its block; flex: the same as a block mask of flex attention, None for dense scores; runs: all
    blocks in order, None if all are computed with the whole context."""

    visible: Tensor
    causal: bool
    flex: Any = None
    runs: tuple[Run, ...] | None = None

    @classmethod
    def of(
        cls, segments: Tensor, last: Tensor, slots: int, causal: bool, flex: bool, window: int = 0
    ) -> View:
        """segments [B, T]; last [B, A]; slots: b. flex: also build the block mask, if it pays off.
        window: positions that a slot sees of the context, counted from its own, besides the last
        one; 0: all."""
        places = torch.arange(segments.shape[1], device=segments.device)
        same = segments[:, None] == segments.gather(1, last)[..., None]  # [B, A, T]
        end = last[..., None, None]
        visible = same[:, :, None] & (places <= end)
        if window:
            stands = end + torch.arange(1, slots + 1, device=last.device)[:, None]  # [B, A, b, 1]
            visible = visible & ((places > stands - window) | (places == end))
        pays = last.shape[1] * slots >= LEAST_QUERIES
        mask = _block_mask(visible, slots, causal) if flex and pays else None
        runs = runs_of(visible) if mask is None and visible.device.type == "cpu" else None
        return cls(visible, causal, mask, runs)

    def of_run(self, run: Run) -> View:
        """What the blocks of a run see of its positions."""
        return View(self.visible[run.row : run.row + 1, run.blocks, :, run.places], self.causal)


def runs_of(visible: Tensor) -> tuple[Run, ...]:
    """Divide the blocks of visible [B, A, b or 1, T] into runs, of which each computes at most
    `MOST_HIDDEN` pairs in vain, or has one block. Reads the mask on the host."""
    seen = visible.any(2).to(torch.uint8)  # [B, A, T]
    begins = seen.argmax(2).tolist()
    ends = (seen.shape[2] - seen.flip(2).argmax(2)).tolist()
    found = []
    for row, spans in enumerate(zip(begins, ends, strict=True)):
        first, low, high, wanted = 0, seen.shape[2], 0, 0
        for block, (begin, end) in enumerate(zip(*spans, strict=True)):
            wide = max(high, end) - min(low, begin)
            hidden = (block + 1 - first) * wide - wanted - (end - begin)
            if block > first and hidden > MOST_HIDDEN:
                found.append(Run(row, slice(first, block), slice(low, high)))
                first, low, high, wanted = block, begin, end, 0
            low, high, wanted = min(low, begin), max(high, end), wanted + end - begin
        found.append(Run(row, slice(first, len(spans[0])), slice(low, high)))
    return tuple(found)


def attend_blocks(query: Tensor, context: KeyValue, own: KeyValue, view: View) -> Tensor:
    """Attention of blocks: query [B, A, b, h, D], context keys and values [B, T, g, D], the blocks'
    own [B, A, b, g, D] -> [B, A, b, h * D]."""
    if view.flex is not None:
        return _flex(query, context, own, view.flex)
    if view.runs is not None:
        return _run_by_run(query, context, own, view, view.runs)
    return _dense(query, context, own, view)


@torch.compiler.disable
def _run_by_run(
    query: Tensor, context: KeyValue, own: KeyValue, view: View, runs: tuple[Run, ...]
) -> Tensor:
    """`attend_blocks` by dense scores of every run. Not compiled: every batch has other runs, and
    would get a separate program."""
    # The gradients of a split are concatenated once; those of slices would be summed as whole rows.
    split = [part.flatten(0, 1).split([run.count for run in runs]) for part in (query, *own)]
    found = []
    for run, *parts in zip(runs, *split, strict=True):
        queries, keys, values = (part[None] for part in parts)  # [R, N, b, heads, D]
        near_keys, near_values = (part[run.row : run.row + 1, run.places] for part in context)
        near = near_keys, near_values  # [R, S, g, D] each
        found.append(_dense(queries, near, (keys, values), view.of_run(run))[0])
    return torch.cat(found).unflatten(0, query.shape[:2])


def _dense(query: Tensor, context: KeyValue, own: KeyValue, view: View) -> Tensor:
    """`attend_blocks` by scores of all blocks with the whole context. The context's keys are shared
    by all blocks of a row and never copied."""
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


class _OutsideModes(torch.autograd.Function):
    """Compiled flex attention inside a dispatch mode, such as the one that counts FLOPs. torch
    compiles nothing there, and its uncompiled flex attention holds all scores and has no
    implementation for modes. So both passes leave the modes, which do not see this attention."""

    @staticmethod
    def forward(ctx: Any, mask: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query [B, h, Q, D], key and value [B, g, K, D] -> [B, h, Q, D]."""
        with _disable_current_modes(), torch.enable_grad(), torch.compiler.set_stance("default"):
            given = [x.detach().requires_grad_(x.requires_grad) for x in (query, key, value)]
            out: Tensor = _compiled()(*given, block_mask=mask, enable_gqa=True)
        ctx.given, ctx.out = given, out
        return out.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of the three inputs."""
        wanted = [x for x in ctx.given if x.requires_grad]
        with _disable_current_modes(), torch.compiler.set_stance("default"):
            found = iter(torch.autograd.grad(ctx.out, wanted, gradient))
        return None, *(next(found) if x.requires_grad else None for x in ctx.given)


def _flex(query: Tensor, context: KeyValue, own: KeyValue, mask: Any) -> Tensor:
    """The same through flex attention: compiled on CUDA, else eager (forward pass only)."""
    blocks, slots = query.shape[1:3]
    pairs = zip(context, own, strict=True)
    key, value = (torch.cat([p, o.flatten(1, 2)], 1).transpose(1, 2) for p, o in pairs)
    rows, key = query.flatten(1, 2).transpose(1, 2).to(value.dtype), key.to(value.dtype)
    if query.is_cuda and not torch.compiler.is_compiling() and is_in_torch_dispatch_mode():
        out: Tensor = _OutsideModes.apply(mask, rows, key, value)
    else:
        run: Any = _compiled() if query.is_cuda else flex_attention
        out = run(rows, key, value, block_mask=mask, enable_gqa=True)
    return out.transpose(1, 2).unflatten(1, (blocks, slots)).flatten(3)
