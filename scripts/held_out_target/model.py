"""The held-out target as a lean training module: Qwen3, that is Llama with a norm over every query and key head.

The state dict is what transformers' Qwen3ForCausalLM loads; a test compares the logits.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from scripts.tiny_target.model import Attention, ModelShape, RMSNorm, TinyLlama, rotate
from scripts.tiny_target.vocabulary import BOS_ID, END_ID, PAD_ID


@dataclasses.dataclass(frozen=True)
class HeldOutShape(ModelShape):
    """Sizes of the held-out target: 2.48 M parameters; queries are wider than the model, as in Qwen3's small sizes."""

    vocabulary: int = 2048
    hidden: int = 160
    layers: int = 7
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 48
    intermediate: int = 448
    positions: int = 2048
    rope_theta: float = 100_000.0
    eps: float = 1e-6

    def config(self) -> dict[str, Any]:
        """Return the content of `config.json` for Qwen3ForCausalLM."""
        content = super().config()
        content.pop("mlp_bias")
        return {
            **content,
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "use_sliding_window": False,
            "sliding_window": None,
            "bos_token_id": BOS_ID,
            "eos_token_id": END_ID,
            "pad_token_id": PAD_ID,
        }


class NormedAttention(Attention):
    """Grouped-query attention whose queries and keys are normalised per head before they are turned."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__(shape)
        self.q_norm = RMSNorm(shape.head_dim, shape.eps)
        self.k_norm = RMSNorm(shape.head_dim, shape.eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return the attention output [B, T, H] for x [B, T, H] and the rotary tables [T, head_dim]."""
        s = self.shape
        rows, length, _ = x.shape
        q = self.q_norm(self.q_proj(x).view(rows, length, s.heads, s.head_dim)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(rows, length, s.kv_heads, s.head_dim)).transpose(1, 2)
        v = self.v_proj(x).view(rows, length, s.kv_heads, s.head_dim).transpose(1, 2)
        q, k = rotate(q, cos, sin).to(v.dtype), rotate(k, cos, sin).to(v.dtype)
        k = k.repeat_interleave(s.heads // s.kv_heads, dim=1)
        v = v.repeat_interleave(s.heads // s.kv_heads, dim=1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).reshape(rows, length, -1))


class TinyQwen3(TinyLlama):
    """Qwen3 with tied embeddings."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__(shape)
        for block in self.model.layers:
            block.self_attn = NormedAttention(shape)
        self.initialise()
