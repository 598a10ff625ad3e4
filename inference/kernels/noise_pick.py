"""Triton kernels of the position-keyed noise: the noise itself, and temperature, noise and argmax
in one pass over the logits.

Reference: `reference/noise.py`. In plain torch a sampled pick writes and reads some twenty tensors
of [B, N, V]; here the logits are read once, and two numbers per program are written. The vocabulary
is split over programs, and a second kernel takes the best of their results. The pick does not
depend on the split: the larger score wins and, of equal scores, the lower column.

The integer bits equal the reference's. The logarithms are computed from float32 additions, products
and fused products, which IEEE 754 defines to the last bit. So the noise is the same in the
interpreter and on every GPU, independent of their libraries. log(2^e (1 + f)) = e ln 2 + f - f^2 /
2 + f^3 Q(f) for f in [-1/3, 1/3], with Q a weighted minimax fit of degree 7 (relative error of the
sum 0.08 * 2^-24). log(1 - v) needs no rounded 1 - v: at every v, f = 2^-e (1 - v) - 1 is exact in
one fused product; for v <= 1/3 it is -v itself, which keeps full precision down to the smallest v,
2^-33. No 64-bit floats are used.

Legend: B rows, M positions per row, N nodes, V columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
"""Columns that one program processes together."""
PROGRAMS = 2048
"""Programs that keep a large GPU busy; with more work, each processes several blocks."""
MAX_STEPS = 8

_LOWEST = tl.constexpr(-(1 << 31))
_HIGHEST = tl.constexpr((1 << 31) - 1)


def noise_pick(
    logits: Tensor,
    positions: Tensor,
    seeds: Tensor | None,
    temperature: float,
    token_ids: Tensor | None = None,
) -> Tensor:
    """See `reference.noise.noise_pick`; logits float16, bfloat16 or float32."""
    rows, nodes, vocab = logits.shape
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    noisy = seeds is not None and temperature != 0
    blocks = triton.cdiv(vocab, BLOCK)
    steps = min(MAX_STEPS, max(1, rows * nodes * blocks // PROGRAMS))
    splits = triton.cdiv(blocks, steps)
    picks = torch.empty(rows, nodes, dtype=torch.int64, device=logits.device)
    scores = torch.empty(rows * nodes, splits, dtype=torch.int32, device=logits.device)
    columns = torch.empty_like(scores)
    _pick_kernel[(rows * nodes, splits)](
        *(logits, positions.contiguous()),
        seeds.contiguous() if seeds is not None else positions,
        positions if token_ids is None else token_ids.contiguous(),
        *(scores, columns, nodes, vocab, logits.stride(0), logits.stride(1)),
        *(float(temperature), steps),
        NOISE=noisy,
        NAMED=token_ids is not None,
        BLOCK=BLOCK,
    )
    padded = triton.next_power_of_2(splits)
    _merge_kernel[(rows * nodes,)](scores, columns, picks, splits, SPLITS=padded)
    return picks


def gumbel_noise(seeds: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """See `reference.noise.gumbel_noise`."""
    return noise_and_bits(seeds, positions, token_ids)[0]


def noise_and_bits(
    seeds: Tensor, positions: Tensor, token_ids: Tensor, with_bits: bool = False
) -> tuple[Tensor, Tensor | None]:
    """The noise float32 [B, M, V] and, if requested, its bits as int32 [B, M, V]."""
    rows, places = positions.shape
    size = token_ids.shape[0]
    noise = torch.empty(rows, places, size, device=seeds.device)
    bits = torch.empty_like(noise, dtype=torch.int32) if with_bits else None
    _noise_kernel[(rows * places, triton.cdiv(size, BLOCK))](
        *(positions.contiguous(), seeds.contiguous(), token_ids.contiguous()),
        *(noise, noise if bits is None else bits, places, size),
        BITS=with_bits,
        BLOCK=BLOCK,
    )
    return noise, bits


@triton.jit
def _mix(x):  # type: ignore[no-untyped-def]
    """`reference.noise._mix` on uint32."""
    x = x ^ (x >> 16)
    x = x * 0x21F0AAAD
    x = x ^ (x >> 15)
    x = x * 0x735A2D97
    return x ^ (x >> 15)


@triton.jit
def _keys(seed, position):  # type: ignore[no-untyped-def]
    """The two 32-bit keys of a row and position, from int64."""
    low, high, where = seed.to(tl.uint32), (seed >> 32).to(tl.uint32), position.to(tl.uint32)
    key_a = _mix(where ^ _mix(low ^ 0x3C6EF372))
    key_b = _mix(key_a ^ _mix(high + 0x1B873593) ^ (where * 0x2545F491))
    return key_a, key_b


@triton.jit
def _bits(token, key_a, key_b):  # type: ignore[no-untyped-def]
    """The random bits of tokens, as uint32."""
    return _mix(_mix((token.to(tl.uint32) * 0x9E3779B1) ^ key_a) + key_b)


@triton.jit
def _exponent(x):  # type: ignore[no-untyped-def]
    """e as int32 with 2/3 <= x / 2^e < 4/3, for positive normal float32 x."""
    return (x.to(tl.int32, bitcast=True) - 0x3F2AAAAB) >> 23


@triton.jit
def _power(e):  # type: ignore[no-untyped-def]
    """2^e as float32, for int32 e of normal numbers."""
    return ((e + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _log(e, f):  # type: ignore[no-untyped-def]
    """log(2^e * (1 + f)) for int32 e and f in [-1/3, 1/3]; see the module."""
    q = tl.fma(f, -0.128916785, 0.139844403)
    q = tl.fma(q, f, -0.121842623)
    q = tl.fma(q, f, 0.140058681)
    q = tl.fma(q, f, -0.16680488)
    q = tl.fma(q, f, 0.200104058)
    q = tl.fma(q, f, -0.249997973)
    q = tl.fma(q, f, 0.333332151)
    near = tl.fma(f * f, tl.fma(q, f, -0.5), f)
    return tl.fma(e.to(tl.float32), 0.6931471805599453, near)


@triton.jit
def _gumbel(bits):  # type: ignore[no-untyped-def]
    """Gumbel noise float32 from uint32 bits."""
    v = tl.minimum((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)
    e = _exponent(1.0 - v)
    scale = _power(-e)
    w = -_log(e, tl.fma(-v, scale, scale - 1.0))
    e = _exponent(w)
    return -_log(e, w * _power(-e) - 1.0)


@triton.jit
def _ordered(score):  # type: ignore[no-untyped-def]
    """int32 keys in the order of float32 scores: -0 equals 0, NaN is above everything."""
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    return tl.where(score != score, _HIGHEST, bits ^ ((bits >> 31) & _HIGHEST))


# fmt: off
@triton.jit
def _pick_kernel(  # type: ignore[no-untyped-def]
    logits, positions, seeds, token_ids, scores, columns, nodes, vocab, row_stride, node_stride,
    temperature, steps,
    NOISE: tl.constexpr, NAMED: tl.constexpr, BLOCK: tl.constexpr,  # noqa: N803
):
    # fmt: on
    """One program per node and split: the best score, as its ordered key, and its column."""
    number, split = tl.program_id(0), tl.program_id(1)
    row, node = number // nodes, number % nodes
    logits += row.to(tl.int64) * row_stride + node.to(tl.int64) * node_stride
    if NOISE:
        key_a, key_b = _keys(tl.load(seeds + row), tl.load(positions + number))
    best = tl.full([BLOCK], _LOWEST, tl.int32)
    where = tl.full([BLOCK], _HIGHEST, tl.int32)
    for step in range(steps):
        column = (split * steps + step) * BLOCK + tl.arange(0, BLOCK)
        real = column < vocab
        score = tl.load(logits + column, mask=real, other=0.0).to(tl.float32)
        if NOISE:
            token = column
            if NAMED:
                token = tl.load(token_ids + column, mask=real, other=0).to(tl.int32)
            score = tl.div_rn(score, temperature) + _gumbel(_bits(token, key_a, key_b))
        key = tl.where(real, _ordered(score), _LOWEST)
        better = key > best
        best = tl.where(better, key, best)
        where = tl.where(better, column, where)
    top = tl.max(best, 0)
    place = number.to(tl.int64) * tl.num_programs(1) + split
    tl.store(scores + place, top)
    tl.store(columns + place, tl.min(tl.where(best == top, where, _HIGHEST), 0))


@triton.jit
def _merge_kernel(scores, columns, picks, splits, SPLITS: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """One program per node: the best of its splits' bests."""
    number = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS)
    best = tl.load(scores + number * splits + split, mask=split < splits, other=_LOWEST)
    where = tl.load(columns + number * splits + split, mask=split < splits, other=_HIGHEST)
    top = tl.max(best, 0)
    tl.store(picks + number, tl.min(tl.where(best == top, where, _HIGHEST), 0).to(tl.int64))


# fmt: off
@triton.jit
def _noise_kernel(  # type: ignore[no-untyped-def]
    positions, seeds, token_ids, noise, bits_out, places, size,
    BITS: tl.constexpr, BLOCK: tl.constexpr,  # noqa: N803
):
    # fmt: on
    """One program per row, position and block of tokens."""
    number = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = column < size
    key_a, key_b = _keys(tl.load(seeds + number // places), tl.load(positions + number))
    bits = _bits(tl.load(token_ids + column, mask=real, other=0), key_a, key_b)
    to = number.to(tl.int64) * size + column
    tl.store(noise + to, _gumbel(bits), mask=real)
    if BITS:
        tl.store(bits_out + to, bits.to(tl.int32, bitcast=True), mask=real)
