"""A product of few rows with a weight, in Triton, whose order of sums is the same for every row and
every number of rows.

Reference: `reference/row_linear.py`. Rows are padded to tiles of 16, the minimum for the matrix
cores. A program multiplies one tile of rows with one tile of outputs over one part of the inputs,
from its beginning to its end. The number of parts depends only on the weight's shape, and gives
every SM work. A second kernel adds the parts in order. So a row goes through the same instructions
for any number of rows. Programs that differ only in their tile of rows follow one another, so that
they find the tile of the weight in the cache.

Legend: M rows, K inputs, O outputs, P parts of the inputs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from heads.kernels.dispatch import is_interpreted

ROWS, OUTPUTS, INPUTS = 16, 32, 128
"""Tile sizes in rows, outputs and inputs; a tile of the weight is 8 KiB in bfloat16."""
PROGRAMS = 264
"""Fewest programs to aim for: two per SM of an H100."""
SUMMED = 1024
"""Outputs per program of the second kernel."""


def row_linear(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """See `reference.row_linear.row_linear`."""
    count, inputs = rows.shape
    outputs = weight.shape[0]
    assert weight.shape[1] == inputs and rows.dtype == weight.dtype, (rows.shape, weight.shape)
    rows, weight = rows.contiguous(), weight.contiguous()
    parts, steps = divide_inputs(outputs, inputs)
    sums = torch.empty(parts, count, outputs, dtype=torch.float32, device=rows.device)
    grid = triton.cdiv(count, ROWS), triton.cdiv(outputs, OUTPUTS), parts
    _product_kernel[grid](
        *(rows, weight, sums, count, outputs, inputs, steps),
        ROWS=ROWS,
        OUTPUTS=OUTPUTS,
        INPUTS=INPUTS,
        # the interpreter stores bfloat16 as raw bits, which numpy cannot multiply
        UPCAST=is_interpreted() and rows.dtype == torch.bfloat16,
        num_warps=4,
        num_stages=4,
    )
    out = torch.empty(count, outputs, dtype=rows.dtype, device=rows.device)
    _sum_kernel[(count, triton.cdiv(outputs, SUMMED))](
        *(sums, rows if bias is None else bias.contiguous(), out, count, outputs, parts),
        BIASED=bias is not None,
        SUMMED=SUMMED,
        num_warps=4,
    )
    return out


def divide_inputs(outputs: int, inputs: int) -> tuple[int, int]:
    """The number of parts of the inputs, and of tiles in each; only from the weight's shape."""
    tiles = triton.cdiv(inputs, INPUTS)
    wanted = triton.cdiv(PROGRAMS, triton.cdiv(outputs, OUTPUTS))
    steps = triton.cdiv(tiles, min(tiles, wanted))
    return triton.cdiv(tiles, steps), steps


# fmt: off
@triton.jit
def _product_kernel(  # type: ignore[no-untyped-def]
    rows, weight, sums, count, outputs, inputs, steps,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,  # noqa: N803
    UPCAST: tl.constexpr,  # noqa: N803
):
    # fmt: on
    """One program per tile of rows, tile of outputs, and part of the inputs."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    part = tl.program_id(2)
    real, wanted = row < count, output < outputs
    total = tl.zeros([ROWS, OUTPUTS], tl.float32)
    first = part * steps * INPUTS
    for start in range(first, tl.minimum(first + steps * INPUTS, inputs), INPUTS):
        given = start + tl.arange(0, INPUTS)
        there = given < inputs
        x_at = rows + row[:, None].to(tl.int64) * inputs + given[None, :]
        x = tl.load(x_at, mask=real[:, None] & there[None, :], other=0.0)
        w_at = weight + output[None, :].to(tl.int64) * inputs + given[:, None]
        w = tl.load(w_at, mask=wanted[None, :] & there[:, None], other=0.0)
        if UPCAST:
            x, w = x.to(tl.float32), w.to(tl.float32)
        total = tl.dot(x, w, total, input_precision="ieee")
    at = sums + (part * count + row[:, None]).to(tl.int64) * outputs + output[None, :]
    tl.store(at, total, mask=real[:, None] & wanted[None, :])


# fmt: off
@triton.jit
def _sum_kernel(  # type: ignore[no-untyped-def]
    sums, bias, out, count, outputs, parts,
    BIASED: tl.constexpr, SUMMED: tl.constexpr,  # noqa: N803
):
    # fmt: on
    """One program per row and tile of outputs: the parts, in their order."""
    row = tl.program_id(0).to(tl.int64)
    output = tl.program_id(1) * SUMMED + tl.arange(0, SUMMED)
    wanted = output < outputs
    total = tl.zeros([SUMMED], tl.float32)
    for part in range(parts):
        at = sums + (part * count + row) * outputs + output
        total += tl.load(at, mask=wanted, other=0.0)
    if BIASED:
        total += tl.load(bias + output, mask=wanted, other=0.0).to(tl.float32)
    tl.store(out + row * outputs + output, total.to(out.dtype.element_ty), mask=wanted)
