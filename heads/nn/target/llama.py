"""Whether a layer of the target computes what a Llama layer does, so that a draft layer may start
as its copy, and the norms of heads of such a copy. Names and shapes alone do not say so: layers of
other families have the same, and multiply their branches, rotate other pairs, or do not rotate."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from heads.api.target_info import TargetInfo, TargetWeights
from heads.nn import init
from heads.nn.blocks import Attention

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Model types whose layers are Llama's, with biases (Qwen2) or norms of heads (Qwen3)."""
PARTS = (
    "input_layernorm",
    "post_attention_layernorm",
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
)
"""The matrices and norms of a Llama layer, from which a draft layer starts."""
HEAD_NORMS = ("self_attn.q_norm", "self_attn.k_norm")
"""Norms of heads, which some Llama-like layers have."""


def unlike_llama(info: TargetInfo, weights: TargetWeights, layer: int) -> str:
    """The reason why layer `layer` (0-based) of the target computes something else than a Llama
    layer of the same sizes; empty if there is none.

    Another family than `FAMILIES`, a sliding window, and tensors that a Llama layer does not have,
    such as scales of packed weights, are reasons. Biases are none.
    """
    if info.model_type not in FAMILIES:
        return f"only layers of {', '.join(FAMILIES)} are known to be Llama's"
    if any(weights.windows[layer : layer + 1]):
        return f"it sees only the latest {weights.windows[layer]} positions"
    prefix = f"model.layers.{layer}."
    known = {f"{part}.{end}" for part in PARTS + HEAD_NORMS for end in ("weight", "bias")}
    own = sorted(name for name in weights.state if name.startswith(prefix))
    odd = [n for n in own if n.removeprefix(prefix) not in known and not n.endswith("inv_freq")]
    return f"it has {odd[0]}" if odd else ""


@torch.no_grad()
def start_heads(
    attention: Attention,
    projections: Mapping[str, Tensor],
    state: Mapping[str, Tensor],
    layer: int,
    factors: Tensor | float = 1.0,
) -> None:
    """Give the query and key heads of an attention that starts from the target's layer the sizes
    that they have there, so that scores keep their spread.

    projections: "q" and "k" -> the copied weights [heads * D, H]; factors [H]: by which the inputs
    of these, of mean square 1, are multiplied. The target's norms are copied. Norms that only the
    attention has start as the average size of the heads; norms that only the target has are folded
    into the projections, which then give heads of their average size.
    """
    for name, weight in projections.items():
        theirs = state.get(f"model.layers.{layer}.self_attn.{name}_norm.weight")
        norm = getattr(attention, f"{name}_norm")
        size = (weight * factors).square().sum(1).mean().sqrt()
        if norm is None:
            if theirs is not None:
                rows = theirs.to(weight).repeat(weight.shape[0] // theirs.shape[0])
                weight.mul_((rows / size)[:, None])
        elif theirs is not None and theirs.shape == norm.weight.shape:
            init.copy(norm.weight, theirs)
        else:
            init.constant(norm.weight, float(size))
