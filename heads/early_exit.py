"""Early exit: the target's first layers, or any set of its layers, draft for all of them.

Three methods are settings of this kind:

- Exit after layer E, directly into the target's final norm and LM head (LayerSkip, 2404.16710; for
  targets that were finetuned to allow it).
- A set of kept layers, found by a search; the residual stream skips the others (Draft & Verify,
  2309.08168; SWIFT, 2410.06916: `scripts/tools/search_layers.py`).
- Exit after layer E into a small trained adapter: one attention block and its own norms before the
  LM head (Kangaroo, 2404.18911).

The target's layers are used without a copy (`heads.nn.target.drafting`).

Loss: cross entropy of the exit's logits against the target's distribution at every supervised
position. With an adapter, it trains the adapter. Without one the drafter has nothing of its own to
train and the gradients flow into the taps; a joint finetuning of the target lowers this loss
(LayerSkip).

Legend: B rows, T positions, M selected positions, H hidden, V vocabulary, g key/value heads, D head
size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, cast

import torch
from annotated_types import Ge, Lt
from torch import Tensor, nn

from heads.api.batch import LossOutput, TrainBatch
from heads.api.checkpoint import unset_parameters
from heads.api.config import Layers, OptionalLayer, UnitInterval, config
from heads.api.errors import UserError
from heads.api.features import FeatureSpec
from heads.api.target_info import TargetInfo, TargetWeights
from heads.nn import init, losses
from heads.nn.attention import sequence_attention
from heads.nn.blocks import MLP, Attention, LayerShape, RMSNorm, initialise_blocks
from heads.nn.feature.base import label_loss, layer_shape
from heads.nn.packing import Packing
from heads.nn.rope import Rotation
from heads.nn.target.drafting import SelfDrafter
from heads.nn.target.layers import DraftLayer, KeptLayer, require_ascending
from heads.nn.target.llama import unlike_llama


@config("head")
@dataclass(frozen=True)
class Config:
    """Configuration of an early exit. Layers are numbered from 0."""

    exit_layer: Layers = 0
    """Number of layers to keep, from the first on; 0 without `layers` and `skip_ratio`: half of
    them."""
    layers: tuple[Layers, ...] = ()
    """Keep exactly these layers instead (ascending), such as those that `python -m
    scripts.tools.search_layers` finds."""
    skip_ratio: Annotated[float, Ge(0), Lt(1)] = 0.0
    """Leave out this share of the layers instead (0 to 1), evenly spread; the first and the last
    are kept. Use it as a start if no set of layers was searched."""
    without_attention: tuple[Layers, ...] = ()
    """Kept layers without their attention."""
    without_mlp: tuple[Layers, ...] = ()
    """Kept layers without their MLP."""
    adapter: Literal["none", "attention", "layer"] = "none"
    """Adapter between the exit and the LM head: none, attention (Kangaroo: an attention block and
    norms) or layer (with an MLP as well). An adapter must be trained and needs `exit_layer`."""
    adapter_from_target_layer: OptionalLayer = -1
    """Start the adapter from this target layer (0-based; Llama or Mistral); -1: random."""
    hard_label_weight: UnitInterval = 0.0
    """Share of the loss that is taken on the answer's token instead of the target's
    distribution."""

    def __post_init__(self) -> None:
        if bool(self.exit_layer) + bool(self.layers) + bool(self.skip_ratio) > 1:
            raise UserError(
                "head.exit_layer, head.layers and head.skip_ratio exclude each other: give one "
                "of them."
            )
        left_out = self.layers or self.skip_ratio
        if self.adapter != "none" and (left_out or self.without_attention or self.without_mlp):
            raise UserError(
                "head.adapter continues the target's true stream after head.exit_layer, so no "
                "layer before it can be left out: drop head.layers, head.skip_ratio, "
                "head.without_attention and head.without_mlp, or set head.adapter=none."
            )
        if self.adapter == "none" and self.adapter_from_target_layer >= 0:
            raise UserError(
                "head.adapter_from_target_layer needs an adapter: set head.adapter to attention "
                "or layer."
            )


def kept_layers(config: Config, info: TargetInfo) -> tuple[KeptLayer, ...]:
    """The target's layers that a configuration keeps; raises `UserError` for invalid ones."""
    every = info.num_layers
    layers = config.layers or tuple(range(config.exit_layer or max(1, every // 2)))
    if config.skip_ratio:
        kept = max(2, every - round(config.skip_ratio * every))
        layers = tuple(sorted({round(place * (every - 1) / (kept - 1)) for place in range(kept)}))
    name = "layers" if config.layers else "exit_layer"
    given = list(config.layers) or config.exit_layer
    require_ascending(layers, every, f"head.{name}", given)
    for name in ("without_attention", "without_mlp"):
        stray = sorted(set(getattr(config, name)) - set(layers))
        if stray:
            raise UserError(
                f"head.{name} names layers {stray} that are not kept; kept are {list(layers)}."
            )
    if not set(layers) - set(config.without_attention):
        raise UserError(
            "head.without_attention leaves no layer with attention: a draft would not see its "
            "own prefix."
        )
    return tuple(
        KeptLayer(layer, layer not in config.without_attention, layer not in config.without_mlp)
        for layer in layers
    )


class Adapter(nn.Module):
    """The trained block after the exit: attention, and an MLP if it is a whole layer. It is a
    `DraftLayer` of a drafter's stack."""

    attends = True
    window = 0

    def __init__(self, shape: LayerShape, with_mlp: bool) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Attention(shape)
        norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps) if with_mlp else None
        self.post_attention_layernorm = norm
        self.mlp = MLP(shape) if with_mlp else None
        self.cache_shape = (shape.num_key_value_heads, shape.head_dim)

    @property
    def dtype(self) -> torch.dtype:
        return self.input_layernorm.weight.dtype

    def key_value(self, states: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        normed = self.input_layernorm(states.to(self.dtype))
        return self.self_attn.key_value(normed, self._cast(rotation))

    def project(self, states: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        normed, rotation = self.input_layernorm(states.to(self.dtype)), self._cast(rotation)
        return self.self_attn.query(normed, rotation), *self.self_attn.key_value(normed, rotation)

    def finish(self, states: Tensor, attended: Tensor | None) -> Tensor:
        out: Tensor = states.to(self.dtype) + self.self_attn.o_proj(attended)
        if self.mlp is not None and self.post_attention_layernorm is not None:
            out = out + self.mlp(self.post_attention_layernorm(out))
        return out

    def _cast(self, rotation: Rotation) -> Rotation:
        return rotation[0].to(self.dtype), rotation[1].to(self.dtype)


class Drafter(SelfDrafter):
    """Some of the target's layers, its LM head, and an adapter between them if it has one."""

    kind: ClassVar[str] = "early_exit"
    label_weight: ClassVar[str] = "hard_label_weight"

    def __init__(self, config: Config, info: TargetInfo) -> None:
        kept = kept_layers(config, info)
        super().__init__(config, info, kept)
        self.exit = kept[-1].layer + 1
        self.whole = kept == tuple(KeptLayer(layer) for layer in range(self.exit))
        self.runs_target_layers = not self.whole
        taps = {item.layer for item in kept if item.attention}
        # Training reads the stream at the exit, whether an adapter or the target itself is trained.
        taps |= {self.exit} if self.whole else set()
        self.needs = FeatureSpec(tuple(sorted(taps)), last_hidden=True, logits=True)
        self.adapter: Adapter | None = None
        self.norm: RMSNorm | None = None
        if config.adapter != "none":
            self.adapter = Adapter(layer_shape(None, info), with_mlp=config.adapter == "layer")
            self.norm = RMSNorm(info.hidden_size, info.rms_norm_eps)
        unset_parameters(self)

    @classmethod
    def works_untrained(cls, config: Any) -> bool:
        """True without an adapter: the drafter then consists of the target's own parts."""
        return bool(config.adapter == "none")

    def initialise(self, weights: TargetWeights, generator: torch.Generator) -> None:
        """A random adapter that adds little to the exit's state, so that training starts near the
        plain exit; or a copy of one of the target's layers."""
        initialise_blocks(self, generator)
        if self.adapter is None or self.norm is None:
            return
        init.copy(self.norm.weight, self._final_norm)
        if self.config.adapter_from_target_layer >= 0:
            self._copy_layer(weights, self.adapter)
            return
        with torch.no_grad():
            self.adapter.self_attn.o_proj.weight.mul_(0.1)
            if self.adapter.mlp is not None:
                self.adapter.mlp.down_proj.weight.mul_(0.1)

    def _copy_layer(self, weights: TargetWeights, adapter: Adapter) -> None:
        """The adapter's weights from those of the same names in one layer of the target."""
        layer = self.config.adapter_from_target_layer
        prefix = f"model.layers.{layer}."
        attention = {name for name in weights.state if name.startswith(f"{prefix}self_attn.")}
        extra = attention - {f"{prefix}self_attn.{name}_proj.weight" for name in "qkvo"}
        other = unlike_llama(self.info, weights, layer)
        for name, parameter in adapter.named_parameters():
            value = weights.state.get(prefix + name)
            if value is None or value.shape != parameter.shape or extra or other:
                odd = f"the target has no such {prefix}{name}"
                odd = f"the target also has {sorted(extra)[0]}" if extra else other or odd
                raise UserError(
                    f"head.adapter_from_target_layer={layer} does not fit target '{self.info.id}' "
                    f"({self.info.model_type}, {self.info.num_layers} layers): the adapter is a "
                    f"Llama layer without biases or head norms, and {odd}. Use -1."
                )
            init.copy(parameter, value)

    def _own_blocks(self) -> Sequence[tuple[DraftLayer, int]]:
        return () if self.adapter is None else ((self.adapter, self.exit),)

    def _normalise(self, states: Tensor) -> Tensor:
        if self.norm is None:
            return super()._normalise(states)
        return cast(Tensor, self.norm(states))

    # Training

    def _sequence(self, batch: TrainBatch) -> Tensor:
        """The LM head's input [B, T, H] after whole first layers; position t predicts t+1.

        Up to the exit the drafter computes the same as the target, so the tap is its state.
        """
        assert batch.taps is not None, "early_exit needs the target's taps"
        states = batch.taps[:, :, -1]
        if self.adapter is not None:
            rotation = self._rope.at(batch.positions, self.adapter.dtype)
            query, key, value = self.adapter.project(states, rotation)
            attended = sequence_attention(query, key, value, Packing.of(batch))
            states = self.adapter.finish(states, attended)
        return self._normalise(states)

    def loss(self, batch: TrainBatch) -> LossOutput:
        """Cross entropy of the exit's prediction against the target's, where supervised.

        Gradients reach the adapter, and the taps if these require them. If layers are left out, it
        is the loss of the first drafted token, one step after the true states.
        """
        ahead, weight = 1 if self.whole else 2, self.config.hard_label_weight
        outputs = self._sequence(batch) if self.whole else self._unroll(batch, 1)[0]
        outputs, tokens = outputs.flatten(0, 1), batch.tokens.flatten()  # [B*T, H], [B*T]

        def part(rows: Tensor) -> losses.Sums:
            logits = self._logits(outputs.index_select(0, rows))  # [M, V]
            states_at = rows + ahead - 1
            values, right = label_loss(batch, logits, tokens[rows + ahead], states_at, weight)
            values = batch.weighed(values, states_at)
            return values.sum(0, keepdim=True), right.sum(0, keepdim=True)

        rows = batch.supervised(ahead).flatten().nonzero().squeeze(1)
        total, correct = losses.sum_over_rows(part, rows, self.info.vocab_size)
        counts = torch.full_like(correct, rows.shape[0])
        return LossOutput(total.sum(), losses.depth_metrics(total, correct, counts))

    def train_logits(self, batch: TrainBatch, depth: int) -> list[Tensor]:
        """Depth k at t is the exit's prediction from token t+k [B, T, V]; none past the end."""
        if not self.whole:
            return super().train_logits(batch, depth)
        logits = self._logits(self._sequence(batch))
        return [logits.roll(-k, 1) for k in range(1, depth + 1)]
