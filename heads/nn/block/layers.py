"""The decoder layers of block drafters: Qwen3's, with keys and values of the target's states.

Every layer computes keys and values of the context (normalised features of the target, without
another norm before them) beside those of the block's slots, with the same projections or with
separate ones (DFlash, 2602.06036; DFlare). Layers may start from layers of the target. The weight
of a layer's first norm is then folded into the projections after it, because the features carry no
such weight; the projections thus get the same input as in the target. Parameter names are those of
serving engines (vLLM and SGLang).

Legend: N blocks, b slots, B rows, T positions, H hidden, h query heads, g key/value heads, D head
size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn

from heads.api.errors import UserError
from heads.api.target_info import TargetInfo, TargetWeights
from heads.nn import init
from heads.nn.block.conv import BlockConv
from heads.nn.blocks import MLP, Attend, Attention, LayerShape, RMSNorm
from heads.nn.checkpointing import network_part
from heads.nn.matrices import set_vectors
from heads.nn.rope import Rotation, rotate
from heads.nn.target.llama import PARTS, start_heads, unlike_llama


class BlockAttention(Attention):
    """Attention with normalised query and key heads that can read the target's features."""

    def __init__(self, shape: LayerShape, own_context: bool) -> None:
        super().__init__(replace(shape, qk_norm=True))
        sizes = shape.hidden_size, shape.num_key_value_heads * shape.head_dim
        self.context_k_proj = nn.Linear(*sizes, bias=False) if own_context else None
        self.context_v_proj = nn.Linear(*sizes, bias=False) if own_context else None

    def context(self, features: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """The target's features [B, T, H] -> keys and values [B, T, g, D]."""
        key = self.k_proj if self.context_k_proj is None else self.context_k_proj
        value = self.v_proj if self.context_v_proj is None else self.context_v_proj
        rotated = rotate(self._heads(key(features), self.k_norm), rotation)
        return rotated, self._heads(value(features), None)


class BlockLayer(nn.Module):
    """Pre-norm attention and SwiGLU over slots, optionally with DFlash 2's convolutions."""

    def __init__(self, shape: LayerShape, own_context: bool, conv_group: int = 0) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = BlockAttention(shape, own_context)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = MLP(shape)
        self.attention_conv = BlockConv(shape.hidden_size, conv_group) if conv_group else None
        self.mlp_conv = BlockConv(shape.hidden_size, conv_group) if conv_group else None

    @network_part
    def forward(self, states: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        """Slots [N, b, H] at `rotation` -> [N, b, H]; `attend` decides what they see."""
        normed = self.input_layernorm(states)
        if self.attention_conv is None:
            states = states + self._attend(normed, rotation, attend)
        else:
            normed, kernel = self.attention_conv.before(normed)
            attended = self._attend(normed, rotation, attend)
            states = states + self.attention_conv.after(attended, kernel)
        normed = self.post_attention_layernorm(states)
        if self.mlp_conv is None:
            return cast(Tensor, states + self.mlp(normed))
        normed, kernel = self.mlp_conv.before(normed)
        return states + self.mlp_conv.after(self.mlp(normed), kernel)

    def _attend(self, normed: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        attention = self.self_attn
        key, value = attention.key_value(normed, rotation)
        return attention.o_proj(attend(attention.query(normed, rotation), key, value))


class LayerFusion(nn.Module):
    """A mixture of the taps per draft layer (DFlare): softmax weights, normalised taps."""

    def __init__(self, layers: int, taps: int, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.empty(layers, taps))
        set_vectors(self.mix)
        self.norms = nn.ModuleList([RMSNorm(hidden_size, eps) for _ in range(layers)])
        self.eps = eps

    def initialise(self, nearest: Sequence[int], first: int) -> None:
        """Layer first + i reads mostly tap number nearest[i]; earlier ones read the mean of all."""
        init.constant(self.mix, 0.0)
        with torch.no_grad():
            for layer, tap in enumerate(nearest, first):
                self.mix[layer, tap] = 4.0

    def forward(self, taps: Tensor) -> list[Tensor]:
        """Taps [B, T, n, H] -> the features [B, T, H] of every draft layer."""
        normed = nn.functional.rms_norm(taps, taps.shape[-1:], None, self.eps)
        shares = self.mix.softmax(-1).to(normed.dtype)
        return [norm(share @ normed) for norm, share in zip(self.norms, shares, strict=True)]


# Starting from the target


def spread(count: int, first: int, last: int) -> tuple[int, ...]:
    """Up to `count` whole numbers from first to last, evenly spread, without repetition."""
    if count == 1 or last <= first:
        return (max(first, last),)
    return tuple(sorted({round(first + i * (last - first) / (count - 1)) for i in range(count)}))


def unfit_layer(info: TargetInfo, weights: TargetWeights, layer: int, mine: BlockLayer) -> str:
    """The reason why a draft layer cannot start from the target's layer; empty if it can.

    Biases are left out: they are small compared with the changes by training.
    """
    own = dict(mine.named_parameters())
    for part in PARTS:
        name, shape = f"model.layers.{layer}.{part}.weight", own[f"{part}.weight"].shape
        value = weights.state.get(name)
        if value is None or value.shape != shape:
            return f"no {name} of shape {list(shape)}"
    return unlike_llama(info, weights, layer)


@torch.no_grad()
def start_layer(mine: BlockLayer, state: Mapping[str, Tensor], layer: int) -> None:
    """Copy the target's layer, with the first norm folded into the projections after it."""
    found = {part: state[f"model.layers.{layer}.{part}.weight"].float() for part in PARTS}
    first = found.pop("input_layernorm")
    own = dict(mine.named_parameters())
    for name in "qkv":
        found[f"self_attn.{name}_proj"] = found[f"self_attn.{name}_proj"] * first
    for part, value in found.items():
        init.copy(own[f"{part}.weight"], value)
    attention = mine.self_attn
    for name in "kv":
        projection = cast(nn.Linear | None, getattr(attention, f"context_{name}_proj"))
        if projection is not None:
            init.copy(projection.weight, found[f"self_attn.{name}_proj"])
    start_heads(attention, {name: found[f"self_attn.{name}_proj"] for name in "qk"}, state, layer)


def start_layers(
    layers: Sequence[BlockLayer],
    chosen: Sequence[int],
    info: TargetInfo,
    weights: TargetWeights,
    required: bool,
) -> bool:
    """Start draft layer i from the target's layer chosen[i]; returns whether that was possible.

    required: raise `UserError` naming what does not fit, instead of leaving the layers alone.
    """
    for mine, layer in zip(layers, chosen, strict=True):
        reason = unfit_layer(info, weights, layer, mine)
        if reason and required:
            raise UserError(
                f"layer {layer} of target '{info.id}' ({info.model_type}, {info.num_layers} "
                f"layers) cannot start a draft layer: {reason}. Leave out "
                "head.from_target_layers and use head.start_from=random, or leave the head's sizes "
                "at 0."
            )
        if reason:
            return False
    for mine, layer in zip(layers, chosen, strict=True):
        start_layer(mine, weights.state, layer)
    return True
