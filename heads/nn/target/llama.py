"""Whether a layer of the target computes what a Llama layer does, so that a draft layer may start
as its copy. Names and shapes alone do not say so."""

from __future__ import annotations

from heads.api.target_info import TargetWeights

PARTS = (
    "input_layernorm",
    "post_attention_layernorm",
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
)
"""The matrices and norms of a Llama layer, from which a draft layer starts."""
HEAD_NORMS = ("self_attn.q_norm", "self_attn.k_norm")
"""Norms of heads, which some Llama-like layers have."""
ADDS_ONE = "its norms add one to their weights"


def unlike_llama(weights: TargetWeights, layer: int, whole: bool = True) -> str:
    """The reason why layer `layer` (0-based) of the target computes something else than a Llama
    layer of the same sizes; empty if there is none.

    Norms that add one to their weight (Gemma), and tensors that a Llama layer does not have, such
    as norms after its two parts, are reasons. Biases are none. whole: False looks at the attention
    and the norms alone.
    """
    if weights.norm_offset:
        return ADDS_ONE
    prefix = f"model.layers.{layer}."
    known = {f"{part}.{end}" for part in PARTS + HEAD_NORMS for end in ("weight", "bias")}
    own = sorted(name for name in weights.state if name.startswith(prefix))
    if not whole:
        own = [name for name in own if not name.startswith(f"{prefix}mlp.")]
    odd = [n for n in own if n.removeprefix(prefix) not in known and not n.endswith("inv_freq")]
    return f"it has {odd[0]}" if odd else ""
