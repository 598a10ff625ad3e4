"""What a training run leaves on disk: the checkpoint to resume from, and the weights and log that leave the machine."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from heads.api.errors import UserError


def save_checkpoint(path: Path, content: dict[str, Any]) -> None:
    """Write a checkpoint (tensors, numbers and strings only) atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    torch.save(content, buffer)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_bytes(buffer.getvalue())
    os.replace(temporary, path)


def load_checkpoint(path: Path, settings: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Return the checkpoint at `path`; UserError when it was made with other settings."""
    content: dict[str, Any] = torch.load(path, map_location=device, weights_only=True)
    other = {k: (content["settings"].get(k), v) for k, v in settings.items() if content["settings"].get(k) != v}
    if other:
        told = ", ".join(f"{name}: {then} then, {now} now" for name, (then, now) in other.items())
        raise UserError(f"{path} was made with other settings ({told}). Give the same ones, or choose another --state folder.")
    return content


def save_weights(path: Path, model: nn.Module) -> None:
    """Write the weights as bfloat16 safetensors, atomically, under the names that LlamaForCausalLM loads."""
    path.parent.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.detach().to("cpu", torch.bfloat16).contiguous() for name, tensor in model.state_dict().items()}
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    save_file(weights, temporary, metadata={"format": "pt"})
    os.replace(temporary, path)
