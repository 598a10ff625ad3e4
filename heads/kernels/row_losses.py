"""Losses of rows of logits against a target's, and their gradient, in Triton.

`reference/row_losses.py` defines the operation. Logits are read in their own dtype and widened in
registers. The only vocabulary-wide tensor that is written is the gradient, in the logits' dtype.
Every lane of a program holds maxima and sums of its own columns, rescaled when its maximum rises,
and the lanes are joined at the end of the row: sums of few terms in float32, always in the same
order, without atomics.

The forward kernel (a program per row) reads both rows once for norms (log-sum-exp), likeliest
tokens, cross entropies and KL(p || q), which is sum p (y - z) + norm_q - norm_p for logits z and y;
and once more if a loss needs normalised probabilities first (reverse KL, JSD, TV, acceptance).
The backward kernel (a program per row and tile) reads both again and writes

    dz = 1/T times the sum over losses of g q (u - sum(q u)),    u = d loss / d q,

with the sums from the forward kernel. A row whose gradients g are all zero is not read.

Bytes per row and token of the vocabulary in bfloat16, forward and backward: 4 + 6 if one pass is
enough, 8 + 6 with two, of which the second finds part of its row in the level-2 cache.
docs/decisions.md has the figures of plain torch.

Legend: R rows, M rows of the target (row r compares with r mod M), V vocabulary, N losses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from heads.kernels.dispatch import on_device
from heads.kernels.reference.row_losses import (
    ACCEPTANCE_NLL,
    CROSS_ENTROPY,
    FORWARD_KL,
    JENSEN_SHANNON,
    NAMES,
    REVERSE_KL,
    SOFT_CROSS_ENTROPY,
    TOTAL_VARIATION,
    RowLosses,
)

BLOCK = 2048
"""Columns of a tile: 16 bytes of bfloat16 for each thread of 8 warps."""
WARPS = 8
TWO_PASSES = {REVERSE_KL, JENSEN_SHANNON, TOTAL_VARIATION, ACCEPTANCE_NLL}
SUMS = 10
"""Numbers per row that the forward kernel stores for the backward kernel (`_forward_kernel`)."""


def row_losses(
    logits: Tensor,
    target_logits: Tensor | None = None,
    labels: Tensor | None = None,
    names: Sequence[str] = (),
    temperature: float = 1.0,
    beta: float = 0.5,
) -> RowLosses:
    """See `reference.row_losses.row_losses`."""
    assert set(names) <= set(NAMES), names
    shape = logits.shape[:-1]
    rows = logits.flatten(0, -2)
    wanted = None if target_logits is None else target_logits.detach()
    aims = None if labels is None else labels.expand(shape).flatten()
    settings = tuple(names), float(temperature), float(beta)
    values, best, target_best = _RowLosses.apply(rows, wanted, aims, *settings)
    found = {name: value.view(shape) for name, value in zip(names, values.unbind(0), strict=True)}
    return RowLosses(found, best.view(shape), target_best)


class _RowLosses(torch.autograd.Function):
    """logits [R, V], the target's [M, V] or None, labels [R] or None -> losses [N, R], likeliest
    tokens [R] and the target's [M] or None."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        wanted: Tensor | None,
        labels: Tensor | None,
        names: tuple[str, ...],
        temperature: float,
        beta: float,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        logits = logits.contiguous()
        count, vocab = logits.shape
        target_rows = 0
        if wanted is not None:
            wanted, target_rows = wanted.contiguous(), wanted.shape[0]
            assert wanted.shape[1] == vocab, (wanted.shape, logits.shape)
            assert count == 0 or count % target_rows == 0, (wanted.shape, logits.shape)
        aims = None if labels is None else labels.contiguous()
        values = logits.new_empty(len(names), count, dtype=torch.float32)
        sums = logits.new_empty(SUMS, count, dtype=torch.float32)
        best = logits.new_empty(count, dtype=torch.int64)
        target_best = None if wanted is None else best.new_empty(target_rows)
        if count:
            _forward_kernel[(count,)](
                *(logits, wanted, aims, values, sums, best, target_best),
                *(vocab, target_rows, 1.0 / temperature, beta),
                **_constants(names, temperature, wanted is not None),
                PASSES=2 if TWO_PASSES & set(names) else 1,
                BLOCK=min(BLOCK, triton.next_power_of_2(vocab)),
                num_warps=WARPS,
            )
        ctx.save_for_backward(logits, wanted, aims, sums)
        ctx.settings = names, temperature, beta
        ctx.mark_non_differentiable(best)
        if target_best is not None:
            ctx.mark_non_differentiable(target_best)
        return values, best, target_best

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        logits, wanted, labels, sums = ctx.saved_tensors
        names, temperature, beta = ctx.settings
        count, vocab = logits.shape
        out = torch.empty_like(logits)
        block = min(BLOCK, triton.next_power_of_2(vocab))
        if count:
            with on_device(logits.device):
                _backward_kernel[(count, triton.cdiv(vocab, block))](
                    *(logits, wanted, labels, grad.contiguous(), sums, out),
                    *(vocab, 0 if wanted is None else wanted.shape[0], 1.0 / temperature, beta),
                    **_constants(names, temperature, wanted is not None),
                    N=len(names),
                    BLOCK=block,
                    num_warps=WARPS,
                )
        return out, None, None, None, None, None


def _constants(names: Sequence[str], temperature: float, soft: bool) -> dict[str, Any]:
    """The compile-time constants of both kernels: the place of each loss among `names`, or -1."""
    places = {name: names.index(name) if name in names else -1 for name in NAMES}
    return {
        "CE": places[CROSS_ENTROPY],
        "SOFT": places[SOFT_CROSS_ENTROPY],
        "KL": places[FORWARD_KL],
        "RKL": places[REVERSE_KL],
        "JSD": places[JENSEN_SHANNON],
        "TV": places[TOTAL_VARIATION],
        "NLL": places[ACCEPTANCE_NLL],
        "TARGET": soft,
        # the cross entropy is at temperature 1
        "TEMPERED": temperature != 1.0,
    }


@triton.jit
def _load(row, column, vocab):  # type: ignore[no-untyped-def]
    """Logits in float32, -inf behind the vocabulary."""
    return tl.load(row + column, mask=column < vocab, other=float("-inf")).to(tl.float32)


@triton.jit
def _above(x):  # type: ignore[no-untyped-def]
    """Finite logits, so that a logit times a probability of 0 is 0; NaN stays."""
    return tl.where(x < -1e30, -1e30, x)


@triton.jit
def _not_below_zero(x):  # type: ignore[no-untyped-def]
    """A divergence that rounding brought below 0 is 0; NaN stays."""
    return tl.where(x < 0.0, 0.0, x)


@triton.jit
def _mixture(log_p, log_q, beta):  # type: ignore[no-untyped-def]
    """log(beta p + (1 - beta) q); where both are 0 it is low and finite."""
    one = _above(log_p) + tl.log(beta)
    other = _above(log_q) + tl.log(1.0 - beta)
    high = tl.maximum(one, other)
    return high + tl.log(1.0 + tl.exp(tl.minimum(one, other) - high))


@triton.jit
def _share(log_q, log_p):  # type: ignore[no-untyped-def]
    """d min(a, b) / d a: half where they are equal, as torch has it."""
    return tl.where(log_q < log_p, 1.0, tl.where(log_q == log_p, 0.5, 0.0))


# fmt: off
@triton.jit
def _second_pass(  # type: ignore[no-untyped-def]
    row, other, values, sums, place, count, vocab, peak, above, norm, target_peak, target_above,
    target_norm, inverse_temperature, beta,
    RKL: tl.constexpr, JSD: tl.constexpr, TV: tl.constexpr, NLL: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    # fmt: on
    """The losses of a row that need normalised probabilities, and what they leave in `sums`."""
    lanes = tl.arange(0, BLOCK)
    reverse = tl.zeros([BLOCK], tl.float32)
    from_p = tl.zeros([BLOCK], tl.float32)
    from_q = tl.zeros([BLOCK], tl.float32)
    apart = tl.zeros([BLOCK], tl.float32)
    ahead = tl.zeros([BLOCK], tl.float32)
    low_top = tl.full([BLOCK], -3e38, tl.float32)
    common = tl.zeros([BLOCK], tl.float32)
    own = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab, BLOCK):
        column = start + lanes
        log_q = (_load(row, column, vocab) - peak) * inverse_temperature - above
        log_p = (_load(other, column, vocab) - target_peak) * inverse_temperature - target_above
        q = tl.exp(log_q)
        p = tl.exp(log_p)
        if RKL >= 0:
            reverse += tl.where(q > 0.0, q * (log_q - log_p), q)
        if JSD >= 0:
            mixed = _mixture(log_p, log_q, beta)
            from_p += tl.where(p > 0.0, p * (log_p - mixed), p)
            from_q += tl.where(q > 0.0, q * (log_q - mixed), q)
        if TV >= 0:
            apart += tl.abs(q - p)
            ahead += tl.where(q > p, q, tl.where(q < p, -q, 0.0))
        if NLL >= 0:
            least = tl.where(log_q < log_p, log_q, log_p)
            rise = least - low_top
            higher = rise > 0.0
            low_top = tl.where(higher, least, low_top)
            fade = tl.exp(-tl.abs(rise))
            old = tl.where(higher, fade, 1.0)
            new = tl.where(higher, 1.0, fade)
            common = common * old + new
            own = own * old + new * _share(log_q, log_p)
    if RKL >= 0:
        found = tl.sum(reverse, 0)
        tl.store(sums + 5 * count + place, found)
        tl.store(values + RKL * count + place, _not_below_zero(found))
    if JSD >= 0:
        drafted = tl.sum(from_q, 0)
        found = beta * tl.sum(from_p, 0) + (1.0 - beta) * drafted
        tl.store(sums + 6 * count + place, drafted)
        tl.store(values + JSD * count + place, _not_below_zero(found))
    if TV >= 0:
        tl.store(sums + 7 * count + place, tl.sum(ahead, 0))
        tl.store(values + TV * count + place, 0.5 * tl.sum(apart, 0))
    if NLL >= 0:
        low_peak = tl.max(low_top, 0)
        scale = tl.exp(low_top - low_peak)
        whole = tl.sum(common * scale, 0)
        # a comparison drops NaN, which both norms still hold
        found = low_peak + tl.log(whole) + 0.0 * (norm + target_norm)
        tl.store(sums + 8 * count + place, found)
        tl.store(sums + 9 * count + place, tl.sum(own * scale, 0) / whole)
        tl.store(values + NLL * count + place, -found)


# fmt: off
@triton.jit
def _forward_kernel(  # type: ignore[no-untyped-def]  # noqa: C901
    logits, wanted, labels, values, sums, best, target_best,
    vocab, target_rows, inverse_temperature, beta,
    CE: tl.constexpr, SOFT: tl.constexpr, KL: tl.constexpr, RKL: tl.constexpr,  # noqa: N803
    JSD: tl.constexpr, TV: tl.constexpr, NLL: tl.constexpr,  # noqa: N803
    TARGET: tl.constexpr, TEMPERED: tl.constexpr,  # noqa: N803
    PASSES: tl.constexpr, BLOCK: tl.constexpr,  # noqa: N803
):
    # fmt: on
    """One program per row. Left in `sums` [10, R]: the largest logit of q and its log-sum-exp above
    that, the same of p, and q's at temperature 1; then KL(q || p), sum q log(q / m), sum q sign(q -
    p), log sum min(p, q), and q's part of that."""
    place = tl.program_id(0).to(tl.int64)
    count = tl.num_programs(0).to(tl.int64)
    row = logits + place * vocab
    lanes = tl.arange(0, BLOCK)
    # below every logit and finite: differences from it are no NaN
    top = tl.full([BLOCK], -3e38, tl.float32)
    mass = tl.zeros([BLOCK], tl.float32)
    plain = tl.zeros([BLOCK], tl.float32)
    at = tl.zeros([BLOCK], tl.int32)
    if TARGET:
        other = wanted + (place % target_rows) * vocab
        target_top = tl.full([BLOCK], -3e38, tl.float32)
        target_mass = tl.zeros([BLOCK], tl.float32)
        target_at = tl.zeros([BLOCK], tl.int32)
        score = tl.zeros([BLOCK], tl.float32)
        gap = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab, BLOCK):
        column = start + lanes
        z = _load(row, column, vocab)
        rise = z - top
        higher = rise > 0.0
        top = tl.where(higher, z, top)
        at = tl.where(higher, column, at)
        fade = tl.exp(-tl.abs(rise) * inverse_temperature)
        mass = tl.where(higher, mass * fade + 1.0, mass + fade)
        if CE >= 0 and TEMPERED:
            fade = tl.exp(-tl.abs(rise))
            plain = tl.where(higher, plain * fade + 1.0, plain + fade)
        if TARGET:
            y = _load(other, column, vocab)
            rise = y - target_top
            higher = rise > 0.0
            target_top = tl.where(higher, y, target_top)
            target_at = tl.where(higher, column, target_at)
            fade = tl.exp(-tl.abs(rise) * inverse_temperature)
            old = tl.where(higher, fade, 1.0)
            new = tl.where(higher, 1.0, fade)
            target_mass = target_mass * old + new
            if SOFT >= 0:
                score = score * old + new * _above(z)
            if KL >= 0:
                gap = gap * old + new * (_above(y) - _above(z))
    peak = tl.max(top, 0)
    tl.store(best + place, tl.min(tl.where(top == peak, at, vocab), 0).to(tl.int64))
    scale = tl.exp((top - peak) * inverse_temperature)
    above = tl.log(tl.sum(mass * scale, 0))
    norm = peak * inverse_temperature + above
    tl.store(sums + place, peak)
    tl.store(sums + count + place, above)
    if CE >= 0:
        plain_above = above
        if TEMPERED:
            plain_above = tl.log(tl.sum(plain * tl.exp(top - peak), 0))
        label = tl.load(labels + place)
        valid = (label >= 0) & (label < vocab)
        said = tl.load(row + label, mask=valid, other=float("nan")).to(tl.float32)
        tl.store(sums + 4 * count + place, plain_above)
        tl.store(values + CE * count + place, plain_above + (peak - said))
    if TARGET:
        target_peak = tl.max(target_top, 0)
        found = tl.min(tl.where(target_top == target_peak, target_at, vocab), 0)
        tl.store(target_best + place, found.to(tl.int64), mask=place < target_rows)
        scale = tl.exp((target_top - target_peak) * inverse_temperature)
        whole = tl.sum(target_mass * scale, 0)
        target_above = tl.log(whole)
        target_norm = target_peak * inverse_temperature + target_above
        tl.store(sums + 2 * count + place, target_peak)
        tl.store(sums + 3 * count + place, target_above)
        if SOFT >= 0:
            mean = tl.sum(score * scale, 0) / whole
            tl.store(values + SOFT * count + place, norm - mean * inverse_temperature)
        if KL >= 0:
            mean = tl.sum(gap * scale, 0) / whole
            found = mean * inverse_temperature + (norm - target_norm)
            tl.store(values + KL * count + place, _not_below_zero(found))
    if PASSES == 2:
        # fmt: off
        _second_pass(
            row, other, values, sums, place, count, vocab, peak, above, norm, target_peak,
            target_above, target_norm, inverse_temperature, beta, RKL, JSD, TV, NLL, BLOCK,
        )
        # fmt: on


# fmt: off
@triton.jit
def _backward_kernel(  # type: ignore[no-untyped-def]
    logits, wanted, labels, grad, sums, out,
    vocab, target_rows, inverse_temperature, beta,
    CE: tl.constexpr, SOFT: tl.constexpr, KL: tl.constexpr, RKL: tl.constexpr,  # noqa: N803
    JSD: tl.constexpr, TV: tl.constexpr, NLL: tl.constexpr,  # noqa: N803
    TARGET: tl.constexpr, TEMPERED: tl.constexpr,  # noqa: N803
    N: tl.constexpr, BLOCK: tl.constexpr,  # noqa: N803
):
    # fmt: on
    """One program per row and tile: the gradient of the logits, from that of the losses [N, R]."""
    place = tl.program_id(0).to(tl.int64)
    count = tl.num_programs(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = column < vocab
    size = 0.0
    for loss in tl.static_range(N):
        # NaN counts
        size += tl.where(tl.load(grad + loss * count + place) == 0.0, 0.0, 1.0)
    slope = tl.zeros([BLOCK], tl.float32)
    if size > 0.0:
        z = _load(logits + place * vocab, column, vocab)
        peak = tl.load(sums + place)
        log_q = (z - peak) * inverse_temperature - tl.load(sums + count + place)
        q = tl.exp(log_q)
        if TARGET:
            y = _load(wanted + (place % target_rows) * vocab, column, vocab)
            log_p = (y - tl.load(sums + 2 * count + place)) * inverse_temperature
            log_p -= tl.load(sums + 3 * count + place)
            p = tl.exp(log_p)
        if SOFT >= 0:
            slope += tl.load(grad + SOFT * count + place) * (q - p)
        if KL >= 0:
            slope += tl.load(grad + KL * count + place) * (q - p)
        if RKL >= 0:
            mean = tl.load(sums + 5 * count + place)
            part = tl.where(q > 0.0, q * (log_q - log_p - mean), q)
            slope += tl.load(grad + RKL * count + place) * part
        if JSD >= 0:
            mean = tl.load(sums + 6 * count + place)
            part = tl.where(q > 0.0, q * (log_q - _mixture(log_p, log_q, beta) - mean), q)
            slope += tl.load(grad + JSD * count + place) * (1.0 - beta) * part
        if TV >= 0:
            mean = tl.load(sums + 7 * count + place)
            sign = tl.where(q > p, 1.0, tl.where(q < p, -1.0, 0.0))
            slope += tl.load(grad + TV * count + place) * 0.5 * q * (sign - mean)
        if NLL >= 0:
            common = tl.load(sums + 8 * count + place)
            least = tl.where(log_q < log_p, log_q, log_p)
            part = q * tl.load(sums + 9 * count + place)
            part -= tl.exp(least - common) * _share(log_q, log_p)
            slope += tl.load(grad + NLL * count + place) * part
        slope *= inverse_temperature
        if CE >= 0:
            if TEMPERED:
                q = tl.exp(z - peak - tl.load(sums + 4 * count + place))
            said = column == tl.load(labels + place)
            slope += tl.load(grad + CE * count + place) * (q - tl.where(said, 1.0, 0.0))
    at = out + place * vocab + column
    tl.store(at, slope.to(out.dtype.element_ty), mask=there)
