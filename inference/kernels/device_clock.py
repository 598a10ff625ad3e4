"""Triton kernel that writes a GPU's clock to memory, after all work launched before it.

Reference: `reference/device_clock.py`. The clock is `%globaltimer` (PTX ISA, special registers):
nanoseconds, the same for all processors of a GPU, advancing in steps of up to a microsecond. The
clock is read when the kernel runs; in a captured graph, at every replay.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import globaltimer


def write_clock(out: Tensor, place: int) -> None:
    """Write the time now to `out[place]`: [P] int64, nanoseconds."""
    _clock_kernel[(1,)](out, PLACE=place, num_warps=1)


@triton.jit
def _clock_kernel(out, PLACE: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    tl.store(out + PLACE, globaltimer())
