"""Triton kernel of the draft heads' residual blocks: all heads in one launch.

Reference: `reference/heads.py`. Whether the kernel is faster than cuBLAS has not been measured on a
GPU, and estimates predict no large gain. Both paths read the weights once, K * H * H numbers. The
reference moves about 6 * K * M * H more (the product is written, read, activated, written, read and
added to the states), which at H = 4096 is 0.15 % more for one row and 2.3 % for sixteen. The
possible gains are two launches per block, and the bandwidth that cuBLAS does not use with so few
rows (70-85 % of the bandwidth is typical for skinny products). So the reference is the default
until a GPU has shown a gain; HEADSTART_KERNELS=triton selects the kernel.

Sums are float32, and the result is rounded once (the reference rounds three times).

Legend: K heads, M rows, H hidden.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from heads.kernels.dispatch import is_interpreted
from inference.kernels.reference import heads as reference_heads

MAX_ROWS = 16
"""Rows of a tensor core tile; with more rows, weights are read again and cuBLAS is faster."""
OUTPUTS, INPUTS = 32, 128
"""Tile of the weights: 8 KiB in bfloat16; 512 programs of 32 steps at K = 4, H = 4096."""


def residual_blocks(states: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """See `reference.heads.residual_blocks`, which runs for more than `MAX_ROWS` rows."""
    heads, rows, hidden = states.shape
    if rows > MAX_ROWS:
        return reference_heads.residual_blocks(states, weight, bias)
    if states.stride(-1) != 1:
        states = states.contiguous()
    weight, bias = weight.contiguous(), bias.contiguous()
    out = torch.empty(heads, rows, hidden, dtype=states.dtype, device=states.device)
    _residual_kernel[(heads, triton.cdiv(hidden, OUTPUTS))](
        *(states, weight, bias, out, rows, hidden, states.stride(0), states.stride(1)),
        ROWS=MAX_ROWS,
        OUTPUTS=OUTPUTS,
        INPUTS=INPUTS,
        # the interpreter stores bfloat16 as raw bits, which numpy cannot multiply
        UPCAST=is_interpreted() and states.dtype == torch.bfloat16,
        num_warps=4,
        num_stages=4,
    )
    return out


# fmt: off
@triton.jit
def _residual_kernel(  # type: ignore[no-untyped-def]
    states, weight, bias, out, rows, hidden, head_stride, row_stride,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,  # noqa: N803
    UPCAST: tl.constexpr,  # noqa: N803
):
    # fmt: on
    """One program per head and tile of outputs; every weight is read by one program, once."""
    head = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, ROWS)
    output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    wanted = output < hidden
    states += head * head_stride
    weight += head * hidden * hidden
    total = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for first in range(0, hidden, INPUTS):
        given = first + tl.arange(0, INPUTS)
        real = given < hidden
        x_at = states + row[:, None] * row_stride + given[None, :]
        x = tl.load(x_at, mask=(row < rows)[:, None] & real[None, :], other=0.0)
        w_at = weight + output[None, :].to(tl.int64) * hidden + given[:, None]
        w = tl.load(w_at, mask=wanted[None, :] & real[:, None], other=0.0)
        if UPCAST:
            x, w = x.to(tl.float32), w.to(tl.float32)
        total = tl.dot(x, w, total, input_precision="ieee")
    total += tl.load(bias + head * hidden + output, mask=wanted, other=0.0).to(tl.float32)[None, :]
    there = (row < rows)[:, None] & wanted[None, :]
    x_at = states + row[:, None] * row_stride + output[None, :]
    x = tl.load(x_at, mask=there, other=0.0).to(tl.float32)
    result = x + total / (1.0 + tl.exp(-total))
    tl.store(out + (head * rows + row[:, None]) * hidden + output[None, :], result, mask=there)
