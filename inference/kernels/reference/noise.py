"""The position-keyed noise and the pick with it in plain torch (Triton: `noise_pick.py`; C++:
`noise_pick.h`).

The bits are the definition: every implementation produces exactly these. The Gumbel noise computed
from them may differ by rounding, at most 2 units in the last place of max(1, |g|) between a kernel
and torch on a CPU. Steps that are compared with each other use the same implementation.

Legend: B rows, M positions per row, N nodes, V columns of the logits, V' of them with noise.
"""

from __future__ import annotations

import torch
from torch import Tensor

from heads.kernels.dispatch import FLOATS, Op

_MASK32 = 0xFFFFFFFF


def _mix(x: Tensor) -> Tensor:
    """A bijective 32-bit mixer on int32 (two multiply-xorshift rounds), wrapping as unsigned."""
    x = x ^ ((x >> 16) & 0xFFFF)
    x = x * 0x21F0AAAD
    x = x ^ ((x >> 15) & 0x1FFFF)
    x = x * 0x735A2D97
    return x ^ ((x >> 15) & 0x1FFFF)


def _low32(x: Tensor) -> Tensor:
    """The low 32 bits of int64 values as int32 with the same bit pattern."""
    x = x & _MASK32
    return torch.where(x > 0x7FFFFFFF, x - (1 << 32), x).to(torch.int32)


def noise_bits(seeds: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """32 random bits per (row, position, token) as int32 [B, M, V'].

    seeds [B] int64 (non-negative), positions [B, M] int64, token_ids [V'] int64. The 64-bit seed
    and the position make two 32-bit keys; each token id passes two keyed mixing rounds. Kernels
    must reproduce these bits exactly.
    """
    low, high = _low32(seeds)[:, None], _low32(seeds >> 32)[:, None]
    where = _low32(positions)
    key_a = _mix(where ^ _mix(low ^ 0x3C6EF372))
    key_b = _mix(key_a ^ _mix(high + 0x1B873593) ^ (where * 0x2545F491))
    tokens = _low32(token_ids * 0x9E3779B1)
    return _mix(_mix(tokens ^ key_a[..., None]) + key_b[..., None])


def gumbel_noise(seeds: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """Gumbel noise float32 [B, M, V'] from `noise_bits`: -log(-log(1 - v)), v in (0, 1).

    Winners have large g, that is small v, where float32 has full relative precision; v is capped
    below 1 so that g is finite.
    """
    unsigned = noise_bits(seeds, positions, token_ids).to(torch.int64) & _MASK32
    v = ((unsigned.to(torch.float32) + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)
    return -torch.log(-torch.log1p(-v))


def at_temperature(logits: Tensor, temperature: float) -> Tensor:
    """logits / temperature, at least float32.

    The divisor is a tensor on the device, as for rows with separate settings: torch on CUDA
    multiplies by the rounded reciprocal of a plain number, which can differ in the last bit.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return wide / wide.new_full((), temperature)


def noise_pick(
    logits: Tensor,
    positions: Tensor,
    seeds: Tensor | None,
    temperature: float,
    token_ids: Tensor | None = None,
) -> Tensor:
    """Columns [B, N] int64 of the best logits / temperature + g; g = 0 if T = 0 or no seeds.

    logits [B, N, V] any float dtype, computed in float32 (float64 in float64); positions [B, N]
    int64 of the tokens being picked; seeds [B] int64; token_ids [V] int64: the tokens of the
    columns, None for 0..V-1. Of equal columns the first wins. Columns at -inf never win unless all
    are at -inf; then column 0 wins. As in torch.argmax, the first NaN wins over everything, so that
    errors become visible.
    """
    if seeds is None or temperature == 0:
        return logits.argmax(-1)
    if token_ids is None:
        token_ids = torch.arange(logits.shape[-1], device=logits.device)
    scaled = at_temperature(logits, temperature)
    return (scaled + gumbel_noise(seeds, positions, token_ids)).argmax(-1)


GUMBEL_NOISE = Op(
    "gumbel_noise", gumbel_noise, "inference.kernels.noise_pick:gumbel_noise", (torch.int64,)
)
NOISE_PICK = Op(
    "noise_pick",
    noise_pick,
    "inference.kernels.noise_pick:noise_pick",
    FLOATS,
    cpp="inference.kernels.cpu_noise_pick:noise_pick",
)
