"""Llama building blocks under Hugging Face's parameter names, so that an export renames nothing.

Legend: B rows, T positions, H hidden, h query heads, g key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from heads.api.errors import UserError
from heads.nn import init
from heads.nn.checkpointing import network_part
from heads.nn.rope import Rotation, rotate


@dataclass(frozen=True)
class LayerShape:
    """Sizes of a decoder layer. qk_norm: RMSNorm on every query and key head (Qwen3);
    attention_bias: queries, keys and values have biases (Qwen2)."""

    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    qk_norm: bool = False
    attention_bias: bool = False

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads != 0:
            raise UserError(
                f"num_attention_heads ({self.num_attention_heads}) must be a multiple of "
                f"num_key_value_heads ({self.num_key_value_heads})."
            )
        if self.head_dim % 2 != 0:
            raise UserError(f"head_dim must be even for rotary positions; given {self.head_dim}.")


class RMSNorm(nn.Module):
    """x / rms(x) * weight, with the mean in float32 (float64 stays float64)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, states: Tensor) -> Tensor:
        wide = states.dtype in (torch.float32, torch.float64)
        if wide and states.device.type == "cpu" and not torch.is_grad_enabled():
            # The library's own one, which is one kernel on a GPU, splits into more operations here.
            mean = states.square().mean(-1, keepdim=True)
            return states * torch.rsqrt(mean.add_(self.eps)) * self.weight
        # of one dtype, for which there is a fused kernel: under autocast weights are wider
        return F.rms_norm(states, self.weight.shape, self.weight.to(states.dtype), self.eps)


class Attention(nn.Module):
    """Projections of an attention block; the caller decides what the queries see."""

    def __init__(self, shape: LayerShape, input_size: int | None = None) -> None:
        super().__init__()
        width, bias = input_size or shape.hidden_size, shape.attention_bias
        self.head_dim = size = shape.head_dim
        self.q_proj = nn.Linear(width, shape.num_attention_heads * size, bias=bias)
        self.k_proj = nn.Linear(width, shape.num_key_value_heads * size, bias=bias)
        self.v_proj = nn.Linear(width, shape.num_key_value_heads * size, bias=bias)
        self.o_proj = nn.Linear(shape.num_attention_heads * size, shape.hidden_size, bias=False)
        self.q_norm = RMSNorm(shape.head_dim, shape.rms_norm_eps) if shape.qk_norm else None
        self.k_norm = RMSNorm(shape.head_dim, shape.rms_norm_eps) if shape.qk_norm else None

    def query(self, states: Tensor, rotation: Rotation) -> Tensor:
        """[B, T, width] -> rotated queries [B, T, h, D]."""
        return rotate(self._heads(self.q_proj(states), self.q_norm), rotation)

    def key_value(self, states: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """[B, T, width] -> rotated keys and values [B, T, g, D]."""
        key = rotate(self._heads(self.k_proj(states), self.k_norm), rotation)
        return key, self._heads(self.v_proj(states), None)

    def new_cache(self, rows: int, slots: int) -> Tensor:
        """Zeros [rows, slots, g, D], for keys or values."""
        heads, weight = self.k_proj.out_features // self.head_dim, self.k_proj.weight
        return weight.new_zeros(rows, slots, heads, self.head_dim)

    def _heads(self, states: Tensor, norm: RMSNorm | None) -> Tensor:
        states = states.unflatten(-1, (-1, self.head_dim))
        return states if norm is None else norm(states)


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, states: Tensor) -> Tensor:
        return cast(Tensor, self.down_proj(F.silu(self.gate_proj(states)) * self.up_proj(states)))


Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(query [B, T, h, D], key, value [B, T, g, D]) -> [B, T, h * D]."""


class ResidualLayer(nn.Module):
    """The parts that layers of all kinds have, and how they end."""

    self_attn: Attention
    mlp: MLP
    post_attention_layernorm: RMSNorm

    @network_part
    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        """The rest of the layer after its attention: output projection and MLP, both residual ->
        [B, T, H]."""
        states = residual + self.self_attn.o_proj(attended)
        return cast(Tensor, states + self.mlp(self.post_attention_layernorm(states)))


class DecoderLayer(ResidualLayer):
    """A Llama decoder layer: pre-norm attention and SwiGLU, each added to the residual stream."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = MLP(shape)
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    @network_part
    def forward(self, states: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        """[B, T, H] -> [B, T, H]; `attend` decides what the queries see."""
        normed = self.input_layernorm(states)
        key, value = self.self_attn.key_value(normed, rotation)
        return self.finish(states, attend(self.self_attn.query(normed, rotation), key, value))


class FusingLayer(ResidualLayer):
    """The decoder layer whose attention reads embedding and feature, 2H side by side. Its residual
    stream is the feature."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.hidden_norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Attention(shape, input_size=2 * shape.hidden_size)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = MLP(shape)

    def read(self, embedded: Tensor, feature: Tensor) -> Tensor:
        """Embeddings and features [B, T, H] -> attention's input [B, T, 2H], embedding first."""
        return torch.cat([self.input_layernorm(embedded), self.hidden_norm(feature)], -1)


def initialise_blocks(module: nn.Module, generator: torch.Generator, most: float = 0.0) -> None:
    """Norms to one, matrices normal with variance 1 / inputs in their order, biases to zero. most:
    the largest standard deviation of a matrix; 0: no limit."""
    for part in module.modules():
        if isinstance(part, RMSNorm):
            init.constant(part.weight, 1.0)
        elif isinstance(part, nn.Linear):
            spread = part.in_features**-0.5
            init.normal(part.weight, min(spread, most) if most else spread, generator)
            if part.bias is not None:
                init.constant(part.bias, 0.0)


def residual_blocks(states: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x + SiLU(U x + b) for K heads (Medusa, Cai et al., 2401.10774, section 2.1.1): [K, M, H].

    states [K, M, H] (an expanded [1, M, H] if all heads read the same), weight [K, H, H] as
    nn.Linear holds it, bias [K, H], all of one dtype.
    """
    return states + F.silu(head_products(states, weight, bias))


def head_products(states: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A linear map for each of K heads: states [K, M, H] (or expanded), weight [K, O, H] as
    nn.Linear holds it, bias [K, O] -> [K, M, O].

    This is one batched product, except on a CPU, where it is one product per head: products of a
    batch are not packed there, and take three times as long for a few rows.
    """
    if states.device.type == "cpu":
        biases = [None] * len(weight) if bias is None else list(bias)
        return torch.stack([F.linear(*each) for each in zip(states, weight, biases, strict=True)])
    if bias is None:
        return torch.bmm(states, weight.transpose(1, 2))
    return torch.baddbmm(bias[:, None], states, weight.transpose(1, 2))
