"""The residual blocks of several draft heads at once. `heads_gemm.py` has the Triton kernel; the
reference is Medusa's implementation (`heads.nn.blocks.residual_blocks`).

Legend: K heads, M rows, H hidden.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from heads.kernels.dispatch import FLOATS, Op
from heads.nn.blocks import residual_blocks

RESIDUAL_BLOCKS = Op(
    "residual_blocks",
    residual_blocks,
    "inference.kernels.heads_gemm:residual_blocks",
    FLOATS,
    by_default=False,  # no GPU has shown a gain: see heads_gemm.py
)


@contextmanager
def decoding_kernels(drafter: Any) -> Iterator[None]:
    """Within the block, a drafter with residual blocks uses the kernels' interface."""
    if not hasattr(drafter, "residual_blocks"):
        yield
        return
    # another engine in the middle of a run may have set it
    before = vars(drafter).get("residual_blocks")
    drafter.residual_blocks = RESIDUAL_BLOCKS
    try:
        yield
    finally:
        if before is None:
            vars(drafter).pop("residual_blocks", None)
