"""Rotary frequencies that depend on the length of the text, made constant.

Two kinds of rotary embeddings choose their frequencies in every forward pass, from the largest
position in it: "longrope" (Phi-3, MiniCPM: a short and a long set) and "dynamic" NTK scaling (which
recomputes them beyond the trained length). In speculative decoding this would not be lossless: a
drafted node may be beyond the boundary while the committed text is not. One long row would also
change the frequencies of its whole batch, whose cached keys were rotated by others. Dynamic scaling
additionally reads the position from the device in every pass. So one set is chosen when the target
is loaded, and kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

PINNED = "pinned"
"""The rope type given to transformers' forward passes, so that they do not update frequencies."""


def pin_frequencies(model: nn.Module, long_context: bool) -> None:
    """Fix the frequencies of every rotary embedding in `model` that would choose them by length.

    Longrope keeps its short set, or its long one (`long_context`); dynamic scaling keeps the
    trained set.
    """
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if isinstance(kinds, str):
            module.rope_type = _pinned(module, kinds, None, long_context)  # type: ignore[assignment]
        elif isinstance(kinds, dict):
            module.rope_type = {  # type: ignore[assignment]
                layer: _pinned(module, kind, layer, long_context) for layer, kind in kinds.items()
            }


def trained_positions(config: Any) -> int | None:
    """Positions that a longrope text model's short set covers; None without one."""
    for part in rope_parts(config):
        if part.get("rope_type") == "longrope":
            found = part.get("original_max_position_embeddings") or getattr(
                config, "original_max_position_embeddings", None
            )
            return None if found is None else int(found)
    return None


def rope_parts(config: Any) -> Iterator[dict[str, Any]]:
    """The rotary settings of a text config: one dict, or one per type of layer."""
    rope = getattr(config, "rope_parameters", None) or {}
    if "rope_type" in rope or "rope_theta" in rope:
        yield rope
    else:
        yield from (part for part in rope.values() if isinstance(part, dict))


def _pinned(module: nn.Module, kind: str, layer: str | None, long_context: bool) -> str:
    """Fix one set of frequencies; returns the rope type to use from then on."""
    if "dynamic" in kind:
        return PINNED
    if kind != "longrope":
        return kind
    if long_context:
        config: Any = module.config
        part = config.rope_parameters if layer is None else config.rope_parameters[layer]
        beyond = int(part["original_max_position_embeddings"]) + 1
        frequencies = getattr(module, "inv_freq" if layer is None else f"{layer}_inv_freq")
        more = {} if layer is None else {"layer_type": layer}
        long, _ = ROPE_INIT_FUNCTIONS["longrope"](
            config, torch.device("cpu"), seq_len=beyond, **more
        )
        frequencies.copy_(long)
    return PINNED
