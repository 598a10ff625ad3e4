"""The embedded target as a lean training module: the same mathematics and parameter names as LlamaForCausalLM.

Training needs neither masks nor caches, and a plain module compiles without graph breaks on any transformers
version. A test compares the logits with transformers' own. Shapes: B rows, T positions, H hidden, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scripts.tiny_target.vocabulary import BOS_ID, END_ID, PAD_ID


@dataclasses.dataclass(frozen=True)
class ModelShape:
    """Sizes of the target, all in units of elements; the defaults give 5.77 M parameters."""

    vocabulary: int = 4096
    hidden: int = 256
    layers: int = 8
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    intermediate: int = 512
    positions: int = 2048
    rope_theta: float = 10_000.0
    eps: float = 1e-5

    def config(self) -> dict[str, Any]:
        """Return the content of `config.json` for LlamaForCausalLM, without a transformers version.

        The rotary settings stand in both spellings that transformers has used.
        """
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate,
            "max_position_embeddings": self.positions,
            "rope_theta": self.rope_theta,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "rms_norm_eps": self.eps,
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "mlp_bias": False,
            "tie_word_embeddings": True,
            "initializer_range": 0.02,
            "use_cache": True,
            "bos_token_id": BOS_ID,
            "eos_token_id": END_ID,
            "pad_token_id": PAD_ID,
            "torch_dtype": "bfloat16",
            "dtype": "bfloat16",
        }


class RMSNorm(nn.Module):
    """Root-mean-square normalisation in float32, then the weight, as in Llama."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Return x [..., H] normalised, in its own dtype."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (self.weight * wide).to(x.dtype)


class Attention(nn.Module):
    """Grouped-query causal attention with rotary positions."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.q_proj = nn.Linear(shape.hidden, shape.heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, shape.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return the attention output [B, T, H] for x [B, T, H] and the rotary tables [T, head_dim]."""
        s = self.shape
        rows, length, _ = x.shape
        q = self.q_proj(x).view(rows, length, s.heads, s.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(rows, length, s.kv_heads, s.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(rows, length, s.kv_heads, s.head_dim).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        # Copied explicitly: the fused kernels' own grouping differs between backends and versions, and k and v are small here.
        k = k.repeat_interleave(s.heads // s.kv_heads, dim=1)
        v = v.repeat_interleave(s.heads // s.kv_heads, dim=1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).reshape(rows, length, -1))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x [B, heads, T, head_dim] turned by the rotary tables [T, head_dim], halves convention."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class MLP(nn.Module):
    """The gated feed-forward network of Llama."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., H] for x [..., H]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """One decoder layer."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden, shape.eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden, shape.eps)
        self.mlp = MLP(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return the residual stream [B, T, H] after this layer."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Backbone(nn.Module):
    """Embeddings, layers and final norm (the `model.` part of the checkpoint's names)."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.hidden)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.hidden, shape.eps)


class TinyLlama(nn.Module):
    """Llama with tied embeddings; the state dict is what LlamaForCausalLM loads."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Backbone(shape)
        frequency = 1.0 / shape.rope_theta ** (torch.arange(0, shape.head_dim, 2).float() / shape.head_dim)
        angle = torch.outer(torch.arange(shape.positions).float(), frequency)
        angle = torch.cat((angle, angle), dim=-1)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)
        self.initialise()

    def initialise(self) -> None:
        """Draw the weights: normal with deviation 0.02, projections into the residual stream scaled down by sqrt(2 L)."""
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                into_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                deviation = 0.02 / math.sqrt(2 * self.shape.layers) if into_residual else 0.02
                nn.init.normal_(parameter, std=deviation)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the logits [B, T, V] for ids [B, T] int64."""
        x = self.model.embed_tokens(ids)
        length = ids.shape[1]
        dtype = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype
        x = x.to(dtype)
        cos, sin = self.cos[:length].to(dtype), self.sin[:length].to(dtype)
        for block in self.model.layers:
            x = block(x, cos, sin)
        return F.linear(self.model.norm(x), self.model.embed_tokens.weight)


def token_losses(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return (negative log likelihood, log normaliser), both [B, T] float32, for logits [B, T, V] and targets [B, T] int64."""
    wide = logits.float()
    normaliser = torch.logsumexp(wide, dim=-1)
    picked = wide.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return normaliser - picked, normaliser
