"""Quantised self: the target with 8-bit or 4-bit weights drafts for itself.

A quantised copy of the target nearly always picks the target's own token, so chains are accepted
almost whole (QuantSpec, 2502.10424; ML-SpecQD, 2503.13565). Where decoding is bound by reading
weights, a draft costs a half or a quarter of a plain step. Weights are quantised when the drafter
is bound (`heads.nn.quantized`); nothing is trained or stored. For committed tokens, the cache holds
the target's own keys and values, which the target's own projections compute from the true streams;
for drafted tokens, it holds those of the quantised layers (`heads.nn.target.drafting`).

It pays off only where the packed product is faster than the plain one (bfloat16; on CPUs for one or
a few rows). Elsewhere weights are unpacked for every product, and drafting is slower than the
target.

Legend: B rows, T positions, H hidden, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor, nn

from heads.api.batch import LossOutput, TrainBatch
from heads.api.config import Layers, TokensFromTwo, config
from heads.api.errors import UserError
from heads.api.features import FeatureSpec
from heads.api.target_info import TargetInfo, TargetWeights
from heads.nn.quantized import Int4Linear, Int8Linear, PackedLinear
from heads.nn.target.drafting import SelfDrafter
from heads.nn.target.layers import KeptLayer, MakeProduct, require_ascending


@config("head")
@dataclass(frozen=True)
class Config:
    """Configuration of a quantised target as drafter."""

    bits: Literal[4, 8] = 4
    """Bits of a weight: 4 (groups with scale and offset) or 8 (one scale per output)."""
    group_size: TokensFromTwo = 64
    """Weights that share a scale at 4 bits; must divide the target's sizes (32 to 128 are fast)."""
    quantize_head: bool = True
    """Quantise the LM head as well; otherwise use the target's."""
    layers: tuple[Layers, ...] = ()
    """Run only these layers of the target (ascending, 0-based); empty: all of them."""

    def __post_init__(self) -> None:
        if self.group_size % 2:
            raise UserError(
                "head.group_size must be an even number of weights, such as 64; given "
                f"{self.group_size}."
            )


class Drafter(SelfDrafter):
    """The target itself in fewer bits."""

    kind: ClassVar[str] = "quantized_self"
    runs_target_layers = True

    def __init__(self, config: Config, info: TargetInfo) -> None:
        layers = config.layers or tuple(range(info.num_layers))
        require_ascending(layers, info.num_layers, "head.layers", list(layers))
        super().__init__(config, info, tuple(KeptLayer(layer) for layer in layers))
        attended = info.num_attention_heads * info.head_dim
        inputs = {info.hidden_size, info.intermediate_size, attended}
        odd = sorted(size for size in inputs if size % config.group_size)
        if config.bits == 4 and odd:
            raise UserError(
                f"head.group_size {config.group_size} does not divide the target's sizes {odd}. "
                f"Give one that divides {sorted(inputs)}, or use head.bits=8."
            )
        self.needs = FeatureSpec(layers)
        self.packed = nn.ModuleList()
        self._head: PackedLinear | None = None

    @classmethod
    def works_untrained(cls, config: Any) -> bool:
        """It has no weights but the target's."""
        return True

    def bind(self, weights: TargetWeights) -> None:
        """Quantise the target's layers, and its LM head if asked for."""
        self.packed = nn.ModuleList()
        super().bind(weights)
        self._head = None
        if self.config.quantize_head:
            self._head = self._pack(weights.lm_head, None)

    def _maker(self, weights: TargetWeights) -> MakeProduct:
        return self._pack

    @torch.no_grad()
    def _pack(self, weight: Tensor, bias: Tensor | None) -> PackedLinear:
        int8, group = self.config.bits == 8, self.config.group_size
        packed = Int8Linear(weight, bias) if int8 else Int4Linear(weight, bias, group)
        self.packed.append(packed)
        return packed

    def initialise(self, weights: TargetWeights, generator: torch.Generator) -> None:
        """Nothing: all weights come from the target when it is bound."""

    def _logits(self, normed: Tensor) -> Tensor:
        if self._head is None:
            return super()._logits(normed)
        return cast(Tensor, self._head(normed))

    def loss(self, batch: TrainBatch) -> LossOutput:
        """There is none; raises `UserError`."""
        raise UserError(
            "kind 'quantized_self' has no weights of its own, so there is nothing to train. "
            "Measure it as it is: name it in measure.heads."
        )
