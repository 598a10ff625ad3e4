"""The residual blocks of several draft heads at once, in plain torch. `heads_gemm.py` holds the Triton kernel.

Legend: K heads, M rows, H hidden.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from inference.kernels.dispatch import FLOATS, Op


def residual_blocks(states: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x + SiLU(U x + b) for K heads with weights of their own (Medusa, Cai et al., 2401.10774, section 2.1.1): [K, M, H].

    states [K, M, H] (an expanded [1, M, H] where all heads read the same), weight [K, H, H] as nn.Linear holds it, bias [K, H], all
    of one dtype. In half precision this rounds after the product, after SiLU and after the sum.
    """
    return states + F.silu(torch.baddbmm(bias[:, None], states, weight.transpose(1, 2)))


RESIDUAL_BLOCKS = Op(
    "residual_blocks",
    residual_blocks,
    "inference.kernels.heads_gemm:residual_blocks",
    FLOATS,
    by_default=False,  # no GPU has shown a gain: see heads_gemm.py
)
