"""Top-k, top-p and min-p without sorting the vocabulary, in Triton: one program per position.

Reference: `reference/filters.py`. Sorting 150,000 logits takes longer than reading them a hundred
times, so the threshold is found by bisection. Logits are read as integers of the same order, and
the count, or the mass, of those above the midpoint is computed 32 times, with the logits in the
level-2 cache. The order of a position's sums does not depend on other positions.

Legend: R rows with separate settings, M positions of each, V vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
"""Logits that a program reads at once."""


def filter_logits(scaled: Tensor, top_k: Tensor, top_p: Tensor, log_min_p: Tensor) -> Tensor:
    """See `reference.filters.filter_logits`."""
    rows, positions, vocab = scaled.shape
    scaled, out = scaled.contiguous(), torch.empty_like(scaled)
    _filter_kernel[(rows * positions,)](
        *(scaled, out, top_k.contiguous(), top_p.float().contiguous()),
        *(log_min_p.float().contiguous(), vocab, positions),
        BLOCK=min(BLOCK, triton.next_power_of_2(vocab)),
        num_warps=8,
    )
    return out


@triton.jit
def _ordered(x):  # type: ignore[no-untyped-def]
    """Integers in the order of the float32 values x; -0 as 0."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _load(row, column, vocab):  # type: ignore[no-untyped-def]
    return tl.load(row + column, mask=column < vocab, other=float("-inf"))


# fmt: off
@triton.jit
def _filter_kernel(  # type: ignore[no-untyped-def]
    scaled, out, top_k, top_p, log_min_p, vocab, positions,
    BLOCK: tl.constexpr,  # noqa: N803
):
    # fmt: on
    """One program per position: the best logit, the two thresholds, the result."""
    place = tl.program_id(0)
    setting = place // positions
    row = scaled + place.to(tl.int64) * vocab
    columns = tl.arange(0, BLOCK)
    k = tl.load(top_k + setting)
    p = tl.load(top_p + setting)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, vocab, BLOCK):
        best = tl.maximum(best, _load(row, start + columns, vocab))
    peak = tl.max(best, 0)
    highest = tl.max(_ordered(best), 0).to(tl.int64)
    # the smallest threshold above which fewer than k lie
    low = tl.full([], -(2**31), tl.int64)
    if k < vocab:
        high = highest
        for _ in range(33):
            middle = (low + high) >> 1
            above = tl.zeros([BLOCK], tl.int32)
            for start in range(0, vocab, BLOCK):
                key = _ordered(_load(row, start + columns, vocab))
                above += ((key > middle) & (start + columns < vocab)).to(tl.int32)
            fewer = tl.sum(above, 0) < k
            high = tl.where(fewer, middle, high)
            low = tl.where(fewer, low, tl.minimum(middle + 1, high))
    kept = low
    if p < 1.0:
        total = tl.zeros([BLOCK], tl.float32)
        for start in range(0, vocab, BLOCK):
            x = _load(row, start + columns, vocab)
            total += tl.where(_ordered(x) >= kept, tl.exp(x - peak), 0.0)
        wanted = p * tl.sum(total, 0)
        high = highest
        for _ in range(33):
            middle = (low + high) >> 1
            above = tl.zeros([BLOCK], tl.float32)
            for start in range(0, vocab, BLOCK):
                x = _load(row, start + columns, vocab)
                key = _ordered(x)
                above += tl.where((key > middle) & (key >= kept), tl.exp(x - peak), 0.0)
            less = tl.sum(above, 0) < wanted
            high = tl.where(less, middle, high)
            low = tl.where(less, low, tl.minimum(middle + 1, high))
    floor = peak + tl.load(log_min_p + setting)
    for start in range(0, vocab, BLOCK):
        x = _load(row, start + columns, vocab)
        stays = (_ordered(x) >= low) & (x >= floor)
        result = tl.where(stays, x, float("-inf"))
        at = out + place.to(tl.int64) * vocab + start + columns
        tl.store(at, result, mask=start + columns < vocab)
