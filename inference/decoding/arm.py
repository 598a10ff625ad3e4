"""An arm: a drafter with the draft that it decodes with. Measurements and tuning compare arms."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import torch

from heads.api.drafter import TrainableDrafter
from inference.decoding.config import DecodeConfig
from inference.manifest import checkpoint_hash


@dataclass(frozen=True)
class Arm:
    """A drafter, its draft, and its checkpoint folder `path` (empty where there is none)."""

    name: str
    drafter: Any
    decode: DecodeConfig
    path: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "decode", self.decode.for_drafter(self.drafter))

    @property
    def weights_sha256(self) -> str:
        """Hash of the checkpoint's weights file; empty for a drafter without one."""
        return checkpoint_hash(self.path)

    def digest(self) -> str:
        """Hash of the drafter's weights in memory; empty for a kind without weights."""
        if not isinstance(self.drafter, TrainableDrafter):
            return ""
        digest = hashlib.sha256()
        for name, value in sorted(self.drafter.state_dict().items()):
            digest.update(name.encode())
            digest.update(value.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()
