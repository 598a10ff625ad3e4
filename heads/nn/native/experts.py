"""Experts of a drafter's layer under autocast.

transformers multiplies the chosen experts' weights in one grouped product (`torch`'s `grouped_mm`),
which autocast does not cover and which supports float32 on few devices. Drafters are trained with
weights in float32 and products in bfloat16, so their experts' weights are cast as autocast casts
those of a linear layer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

EXPERTS = "headstart_drafter"
"""The name under which transformers knows this way of running experts."""


def register() -> None:
    """Register it with transformers."""
    # heavy, and only drafters of this type need it
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(EXPERTS, run)


def run(experts: nn.Module, states: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
    """The function that transformers calls: states [M, H], chosen experts [M, K] int64 and their
    shares [M, K] -> [M, H]."""
    # as above
    from transformers.integrations.moe import grouped_mm_experts_forward

    kind, dtype = states.device.type, states.dtype
    if not torch.is_autocast_enabled(kind):
        found: Tensor = grouped_mm_experts_forward(experts, states, chosen, shares)
        return found
    low = torch.get_autocast_dtype(kind)
    found = grouped_mm_experts_forward(_Cast(experts, low), states.to(low), chosen, shares)
    return found.to(dtype)


class _Cast:
    """A module whose weights are cast where they are read."""

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        self._module, self._dtype = module, dtype

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        return value.to(self._dtype) if isinstance(value, nn.Parameter) else value
