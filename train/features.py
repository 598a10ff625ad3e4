"""Where a drafter's training features come from: the same target, through the same taps, as in decoding."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Protocol

import torch
from torch import Tensor

from heads.api.batch import TrainBatch
from heads.api.errors import UserError, suggest
from heads.api.features import FeatureSpec
from heads.api.target_info import TargetWeights
from train.data.loader import PackedBatch

MODES = ("online",)


@dataclass(frozen=True)
class FeaturesConfig:
    """How features reach the trainer."""

    mode: str = "online"
    """online: the frozen target runs in the training process; nothing is stored."""

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise UserError(f"features.mode '{self.mode}' is unknown.{suggest(self.mode, MODES)}")


class FeatureTarget(Protocol):
    """What is asked of a target here; `inference.target.TargetModel` has it."""

    weights: TargetWeights
    device: torch.device
    dtype: torch.dtype

    def features(
        self, tokens: Tensor, positions: Tensor, segments: Tensor, needs: FeatureSpec
    ) -> tuple[Tensor | None, Tensor | None]: ...


class OnlineFeatures:
    """Runs the frozen target on every micro-batch.

    dtype: of the features that the drafter is given (default: the target's). Where that is bfloat16, a float32 target runs under
    autocast: nearly twice as fast on a CPU, and closer to its float32 self than a copy of it in bfloat16.
    """

    def __init__(self, target: FeatureTarget, needs: FeatureSpec, dtype: torch.dtype | None = None) -> None:
        self.target, self.needs, self.dtype = target, needs, dtype or target.dtype
        self.autocast = self.dtype == torch.bfloat16 and target.dtype == torch.float32

    @torch.no_grad()
    def batch(self, packed: PackedBatch, step: int = 0) -> TrainBatch:
        """`packed` on the target's device with taps [B, T, n, H] and last_hidden [B, T, H] as far as they are needed; the same in
        every step of the training.
        """
        device = self.target.device
        moved = {
            item.name: getattr(packed, item.name).to(device, non_blocking=True)
            for item in fields(packed)
            if item.name != "seeds"  # read on the host
        }
        with torch.autocast(device.type, torch.bfloat16, enabled=self.autocast):
            taps, last_hidden = self.target.features(
                moved["tokens"], moved["positions"], moved["segments"], self.needs
            )
        return TrainBatch(
            **moved,
            taps=None if taps is None else taps.to(self.dtype),
            last_hidden=None if last_hidden is None else last_hidden.to(self.dtype),
            target_logits=self._logits if self.needs.logits else None,
            seeds=packed.seeds,
        )

    @torch.no_grad()
    def _logits(self, hidden: Tensor) -> Tensor:
        """The target's logits [M, V] at last hidden states [M, H], in the target's own dtype."""
        with torch.autocast(hidden.device.type, enabled=False):
            return self.target.weights.logits(hidden.to(self.target.dtype))
