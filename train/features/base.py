"""The target's features for training, read through the same taps as in decoding.

Four sources give the same numbers: the training process (here), a store on disk (store/), feature
servers (remote/client.py), and other processes of the same launch (group.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from heads.api.batch import TrainBatch
from heads.api.features import FeatureSpec
from heads.api.target_info import TargetInfo, TargetWeights
from train.data.loader import PackedBatch
from train.features.store.batches import batch_on


class FeatureTarget(Protocol):
    """The methods of a target that features need; `inference.target.model.TargetModel` has them."""

    info: TargetInfo
    weights: TargetWeights
    device: torch.device
    dtype: torch.dtype

    def features(
        self, tokens: Tensor, positions: Tensor, segments: Tensor, needs: FeatureSpec
    ) -> tuple[Tensor | None, Tensor | None]: ...


class OnlineFeatures:
    """Runs the frozen target on every micro-batch. dtype: of the features (default: the target's).
    For bfloat16, a float32 target runs under autocast. This is nearly twice as fast on a CPU, and
    closer to the float32 target than a copy of it in bfloat16."""

    def __init__(
        self, target: FeatureTarget, needs: FeatureSpec, dtype: torch.dtype | None = None
    ) -> None:
        self.target, self.needs, self.dtype = target, needs, dtype or target.dtype
        self.autocast = self.dtype == torch.bfloat16 and target.dtype == torch.float32

    @torch.no_grad()
    def batch(self, packed: PackedBatch, step: int = 0) -> TrainBatch:
        """`packed` on the target's device with taps [B, T, n, H] and last_hidden [B, T, H] as
        needed."""
        device = self.target.device
        batch = batch_on(packed, device)
        with torch.autocast(device.type, torch.bfloat16, enabled=self.autocast):
            taps, last_hidden = self.target.features(
                batch.tokens, batch.positions, batch.segments, self.needs
            )
        batch.taps = None if taps is None else taps.to(self.dtype)
        batch.last_hidden = None if last_hidden is None else last_hidden.to(self.dtype)
        batch.target_logits = self.logits if self.needs.logits else None
        return batch

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """The target's logits [M, V] at last hidden states [M, H], in the target's own dtype."""
        with torch.autocast(hidden.device.type, enabled=False):
            return self.target.weights.logits(hidden.to(self.target.dtype))


@contextmanager
def in_use(features: Features) -> Iterator[Features]:
    """Close the files, connections and threads of features when a training ends."""
    try:
        yield features
    finally:
        close = getattr(getattr(features, "plain", features), "close", None)
        if close is not None:
            close()


class Features(Protocol):
    """Where training batches come from; `train.features.OnlineFeatures` is one."""

    def batch(self, packed: PackedBatch, step: int = 0) -> TrainBatch: ...
