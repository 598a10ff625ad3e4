"""A device's clock, written to memory between the operations of a step; on a CPU, the host's clock.
`device_clock.py` has the Triton kernel."""

from __future__ import annotations

import time

from torch import Tensor

from heads.kernels.dispatch import Op


def write_clock(out: Tensor, place: int) -> None:
    """Write the time now to `out[place]`: [P] int64, nanoseconds from an arbitrary start."""
    out[place] = time.perf_counter_ns()


WRITE_CLOCK = Op("write_clock", write_clock, "inference.kernels.device_clock:write_clock")
