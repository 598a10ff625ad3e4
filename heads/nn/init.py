"""Initial values of weights: drawn on the CPU in float32, so that a seed gives the same drafter on
every device and in every dtype. Every function fills the tensor it is given, in place.
"""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def normal(parameter: Tensor, std: float, generator: torch.Generator) -> None:
    """Fill with N(0, std^2) drawn from a CPU generator."""
    drawn = torch.empty(parameter.shape, dtype=torch.float32)
    parameter.copy_(drawn.normal_(0.0, std, generator=generator))


@torch.no_grad()
def constant(parameter: Tensor, value: float) -> None:
    """Fill with one value."""
    parameter.fill_(value)


@torch.no_grad()
def copy(parameter: Tensor, value: Tensor) -> None:
    """Fill with `value` of the same shape (a broadcast would hide a mistake)."""
    assert parameter.shape == value.shape, (
        f"shape {tuple(value.shape)} for a weight of shape {tuple(parameter.shape)}"
    )
    parameter.copy_(value)
