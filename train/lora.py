"""Low-rank updates (LoRA) of a module's linear layers, through peft."""

from __future__ import annotations

import torch
from torch import nn

from heads.api.errors import UserError

ADAPTER = "default"
"""The one adapter's name inside peft's layers."""


def inject(module: nn.Module, names: list[str], rank: int, alpha: float, setting: str) -> None:
    """Add updates, whose values the caller sets, to the layers `names` of `module`. Raises
    `UserError`, which names the `setting` that asks for them, without peft."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise UserError(
            f"{setting} needs peft, which cannot be imported ({error}). Install it."
        ) from error
    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=names, init_lora_weights=False)
    device = next(module.parameters()).device
    # the random values drawn here differ between processes and are not kept
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        inject_adapter_in_model(config, module, ADAPTER)
