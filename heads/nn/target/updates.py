"""Low-rank updates (LoRA, 2106.09685) of the target's layers. They are weights of a drafter; the
target stays as it is.

An update of a weight W [out, in] is scale * B A with A [r, in] and B [out, r]. It is added to the
product with W, never to W itself. So one pass can apply it to some rows and leave others exactly as
the target computes them. Names within a layer are Hugging Face's (`self_attn.q_proj.lora_A`), as in
an adapter of the library peft.

Legend: H hidden, r rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, cast, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from heads.api.target_info import TargetInfo
from heads.nn import init
from heads.nn.matrices import set_matrix
from heads.nn.target.layers import Product, TargetLayer, weight_sizes

Module = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
"""The linear layers that may be updated."""
MODULES: tuple[Module, ...] = get_args(Module)


class LowRank(nn.Module):
    """The update of one weight, without its scale."""

    def __init__(self, outputs: int, inputs: int, rank: int) -> None:
        super().__init__()
        self.lora_A = nn.Parameter(torch.empty(rank, inputs))
        self.lora_B = nn.Parameter(torch.empty(outputs, rank))
        set_matrix(self.lora_A, True)
        set_matrix(self.lora_B, True)

    def forward(self, states: Tensor) -> Tensor:
        """B A x for states x [..., in] -> [..., out]."""
        down = self.lora_A
        return F.linear(F.linear(states.to(down.dtype), down), self.lora_B)

    def initialise(self, generator: torch.Generator) -> None:
        """A with the variance of peft's uniform one, B zero: the update starts at zero."""
        init.normal(self.lora_A, (3 * self.lora_A.shape[1]) ** -0.5, generator)
        init.constant(self.lora_B, 0.0)


class LayerUpdates(nn.Module):
    """The updates of one layer's linear layers named in `modules`, of rank `rank`."""

    def __init__(self, info: TargetInfo, modules: Iterable[str], rank: int) -> None:
        super().__init__()
        self.self_attn, self.mlp = nn.ModuleDict(), nn.ModuleDict()
        for name, shape in weight_sizes(info).items():
            part, _, module = name.rpartition(".")
            if module in modules:
                outputs, inputs = shape
                update = LowRank(outputs, inputs, rank)
                cast(nn.ModuleDict, self.get_submodule(part))[module] = update

    def of(self, part: str, product: str) -> LowRank | None:
        """The update of `product` ("q_proj") in `part` ("self_attn"), if there is one."""
        table = cast(nn.ModuleDict, self.get_submodule(part))
        return cast(LowRank, table[product]) if product in table else None


@dataclass(frozen=True)
class Updated:
    """A `Product` with an update of all rows [..., P, in] but the first `bare` of P."""

    base: Product
    update: LowRank
    scale: float
    bare: int

    def __call__(self, states: Tensor) -> Tensor:
        found = self.base(states)
        rows = states[..., self.bare :, :]
        added = found[..., self.bare :, :] + (self.scale * self.update(rows)).to(found.dtype)
        return torch.cat([found[..., : self.bare, :], added], -2) if self.bare else added


def updated_layers(
    layers: Sequence[TargetLayer], updates: Sequence[LayerUpdates], scale: float, bare: int
) -> list[TargetLayer]:
    """The target's whole layers with their updates, from row `bare` of every run on.

    Keys and values of committed tokens (`TargetLayer.key_value`) are the target's own.
    """
    return [_updated(layer, own, scale, bare) for layer, own in zip(layers, updates, strict=True)]


def _updated(layer: TargetLayer, own: LayerUpdates, scale: float, bare: int) -> TargetLayer:
    attention, mlp = layer.attention, layer.mlp
    assert attention is not None and mlp is not None, "updates are of whole layers"

    def product(part: str, module: str, base: Product) -> Product:
        update = own.of(part, module)
        return base if update is None else Updated(base, update, scale, bare)

    return replace(
        layer,
        attention=replace(
            attention,
            query=product("self_attn", "q_proj", attention.query),
            key=product("self_attn", "k_proj", attention.key),
            value=product("self_attn", "v_proj", attention.value),
            output=product("self_attn", "o_proj", attention.output),
        ),
        mlp=replace(
            mlp,
            gate=product("mlp", "gate_proj", mlp.gate),
            up=product("mlp", "up_proj", mlp.up),
            down=product("mlp", "down_proj", mlp.down),
        ),
    )
