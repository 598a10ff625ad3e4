"""The shape of a small language model that drafts: sizes, start, rotary positions.

Legend: D head size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Annotated

from annotated_types import Ge, Le

from heads.api.config import Depth, Layers, PositiveFloat, Size, UnitInterval, config
from heads.api.errors import UserError
from heads.api.target_info import Rotary, TargetInfo
from heads.nn.blocks import LayerShape
from heads.nn.feature import base
from heads.nn.rope import inverse_frequencies

QK_NORM_FAMILIES, BIAS_FAMILIES = ("qwen3",), ("qwen2",)
"""Model types whose attention has norms of queries and keys, or biases."""


@config("head")
@dataclass(frozen=True)
class NetworkConfig:
    """The network of a small language model. Sizes of 0 follow the target."""

    num_layers: Depth = 2
    """Decoder layers; ignored if `from_target_layers` is given."""
    hidden_size: Size = 0
    """Width of the residual stream."""
    num_attention_heads: Size = 0
    """Query heads; 0: as many as heads of the target's size fit into hidden_size."""
    num_key_value_heads: Size = 0
    """Key/value heads; 0: the target's number if it divides the query heads, otherwise as many as
    query heads."""
    head_dim: Size = 0
    """Size of a head (even)."""
    intermediate_size: Size = 0
    """Width of the MLP; 0: in proportion to hidden_size as in the target."""
    rms_norm_eps: UnitInterval = 0.0
    """Value added to mean squares in every norm; 0: the target's."""
    rope_theta: Annotated[float, Ge(0), Le(1e12)] = 0.0
    """Base of the rotary positions; 0: the target's. Copied layers use the target's."""
    rope_scaling: tuple[PositiveFloat, ...] = ()
    """Llama 3.1's scaling of the rotary frequencies: factor, low_freq_factor, high_freq_factor and
    original_max_position_embeddings; empty: none."""
    qk_norm: bool = False
    """Apply RMSNorm to every query and key head, as in Qwen3 and in layers copied from it."""
    attention_bias: bool = False
    """Use biases on queries, keys and values, as in Qwen2 and in layers copied from it."""
    from_target_layers: tuple[Layers, ...] = ()
    """Start from these layers of the target (ascending, 0-based) with its embedding, final norm and
    LM head; all sizes are then the target's."""
    from_model: str = ""
    """Start from this folder: a smaller Llama, Mistral, Qwen2 or Qwen3 in Hugging Face's format
    (safetensors), or the checkpoint of a small-model drafter. Sizes and rotary positions are those
    of this model, and the vocabulary is padded or trimmed to the target's."""
    any_tokenizer: bool = False
    """Accept a `from_model` with another tokenizer, whose ids stand for other words at the
    start."""
    share_embeddings: bool = False
    """Use the target's frozen embedding and LM head (needs its hidden_size)."""
    tie_embeddings: bool = False
    """Use the drafter's own embedding as its LM head as well."""

    def __post_init__(self) -> None:
        if self.share_embeddings and self.tie_embeddings:
            raise UserError(
                "head.share_embeddings and head.tie_embeddings exclude each other: what is "
                "shared is not own."
            )
        if list(self.from_target_layers) != sorted(set(self.from_target_layers)):
            raise UserError(
                "head.from_target_layers must ascend without repetition; given "
                f"{self.from_target_layers}."
            )
        if self.rope_scaling and (len(self.rope_scaling) != 4 or min(self.rope_scaling) <= 0):
            raise UserError(
                "head.rope_scaling must hold four numbers above 0 (factor, low_freq_factor, "
                "high_freq_factor, original_max_position_embeddings) or nothing; given "
                f"{list(self.rope_scaling)}."
            )
        if self.from_model and self.from_target_layers:
            raise UserError(
                "head.from_model and head.from_target_layers exclude each other: a drafter "
                "starts from one of the two."
            )


def layer_shape(config: NetworkConfig, info: TargetInfo) -> LayerShape:
    """Sizes of the drafter's layers; those not given follow the target."""
    eps = config.rms_norm_eps or info.rms_norm_eps
    if config.from_target_layers:
        return replace(
            base.layer_shape(None, info),
            rms_norm_eps=eps,
            qk_norm=config.qk_norm or info.model_type in QK_NORM_FAMILIES,
            attention_bias=config.attention_bias or info.model_type in BIAS_FAMILIES,
        )
    hidden = config.hidden_size or info.hidden_size
    head_dim = config.head_dim or info.head_dim
    heads = config.num_attention_heads or max(1, hidden // head_dim)
    kv_heads = config.num_key_value_heads
    if not kv_heads:
        kv_heads = info.num_key_value_heads if heads % info.num_key_value_heads == 0 else heads
    intermediate = config.intermediate_size or max(
        1, round(hidden * info.intermediate_size / info.hidden_size)
    )
    return LayerShape(
        hidden, heads, kv_heads, head_dim, intermediate, eps, config.qk_norm, config.attention_bias
    )


def scaled_frequencies(theta: float, head_dim: int, scaling: tuple[float, ...]) -> Rotary:
    """Llama 3.1's rotary frequencies: long waves slowed by `factor`, those between partly."""
    factor, low, high, original = scaling
    frequencies = inverse_frequencies(head_dim, theta)
    wavelength = 2 * math.pi / frequencies
    # 1: short waves, 0: long ones
    kept = ((original / wavelength - low) / (high - low)).clamp(0.0, 1.0)
    return Rotary((1.0 - kept) * frequencies / factor + kept * frequencies)
