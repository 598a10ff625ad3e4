"""Checkpoints of drafters for the micro target, good ones and bad ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from heads.api.checkpoint import WEIGHTS_FILE, new_drafter, save_drafter
from heads.api.registry import get_kind
from inference.target.model import TargetModel


def checkpoint(folder: Path, target: TargetModel, kind: str, seed: int = 1, **changes: Any) -> Path:
    """A fresh drafter of a kind, saved. changes: to what it says of its target."""
    drafter = new_drafter(kind, get_kind(kind).config_class(), target.info, target.weights, seed)
    save_drafter(drafter, folder, replace(target.info, **changes))
    return folder


def not_a_number(folder: Path, target: TargetModel) -> Path:
    """One with a weight that is not finite."""
    weights = checkpoint(folder, target, "eagle3") / WEIGHTS_FILE
    tensors = load_file(weights)
    first = next(name for name, value in tensors.items() if value.is_floating_point())
    tensors[first].view(-1)[0] = torch.nan
    save_file(tensors, weights, {"format": "pt"})
    return folder


def truncated(folder: Path, target: TargetModel) -> Path:
    """One whose file of weights ends in the middle."""
    weights = checkpoint(folder, target, "eagle3") / WEIGHTS_FILE
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    return folder


def without_weights(folder: Path, target: TargetModel) -> Path:
    """One whose file of weights is missing."""
    (checkpoint(folder, target, "eagle3") / WEIGHTS_FILE).unlink()
    return folder


def of_another_revision(folder: Path, target: TargetModel) -> Path:
    return checkpoint(folder, target, "eagle3", revision="0" * 40)


def of_another_vocabulary(folder: Path, target: TargetModel) -> Path:
    return checkpoint(folder, target, "ngram", vocab_size=target.info.vocab_size + 1)


BAD = {
    "not finite": not_a_number,
    "damaged|truncated|broken|incomplete|not a safetensors": truncated,
    "is missing|not there|no such|does not exist|no file": without_weights,
    "with revision": of_another_revision,
    "with vocab_size": of_another_vocabulary,
}
"""What the refusal says, and what makes the checkpoint."""
