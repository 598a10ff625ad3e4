"""Projections of the same states as one product: queries, keys and values; gate and up.

Each product of few rows is a separate launch, which a merged weight saves. The weights of the
merged layers become views of it, so that no weight is held twice and every layer still has its
weight. The first layer of a group computes the products of all. The others return their part if
they get the same states, and compute their own product otherwise.

Legend: K inputs, O outputs of all layers of a group.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of projections of the same states."""
_MERGED = "headstart_merged"
"""Attribute of the forward functions that `merge` has given."""


class Shared:
    """The product that the first layer of a group has computed for the others."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias  # [O, K], [O]
        self.states: Tensor | None = None
        self.product: Tensor | None = None


def merge(layer: nn.Module) -> int:
    """Merge the groups of every module within `layer`; returns the number of saved launches."""
    spared = 0
    for module in layer.modules():
        for names in GROUPS:
            linears: list[Any] = [getattr(module, name, None) for name in names]
            if all(map(_fits, linears)) and _alike(linears):
                _merge(linears)
                spared += len(linears) - 1
    return spared


def separate(layer: nn.Module) -> None:
    """Let merged projections within `layer` compute their own products again. Their weights stay
    where they are."""
    for module in layer.modules():
        if hasattr(vars(module).get("forward"), _MERGED):
            del module.forward


def _fits(linear: Any) -> bool:
    return (
        type(linear) is nn.Linear
        and type(linear.weight) is nn.Parameter
        and not linear.weight.requires_grad
        and "forward" not in linear.__dict__
    )


def _alike(linears: list[Any]) -> bool:
    """Whether all have the same device, dtype and width, and all or none have a bias."""
    kinds = {(one.weight.device, one.weight.dtype, one.in_features) for one in linears}
    return len(kinds) == 1 and len({one.bias is None for one in linears}) == 1


def _merge(linears: list[nn.Linear]) -> None:
    with torch.no_grad():
        weight = torch.cat([one.weight for one in linears])
        bias = None
        if linears[0].bias is not None:
            bias = torch.cat([one.bias for one in linears])
        shared, first = Shared(weight, bias), 0
        for place, one in enumerate(linears):
            span = slice(first, first + one.out_features)
            one.weight.data = weight[span]
            if bias is not None:
                one.bias.data = bias[span]
            last = place + 1 == len(linears)
            vars(one)["forward"] = part = _part(one, shared, span, place == 0, last)
            setattr(part, _MERGED, True)
            first = span.stop


def _part(
    linear: nn.Linear, shared: Shared, span: slice, leads: bool, ends: bool
) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        if leads:
            shared.states, shared.product = x, F.linear(x, shared.weight, shared.bias)
        elif shared.states is not x:
            return F.linear(x, linear.weight, linear.bias)
        assert shared.product is not None
        out = shared.product[..., span]
        if ends:
            shared.states = shared.product = None
        return out

    return forward
