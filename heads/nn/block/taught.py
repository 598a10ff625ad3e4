"""The labels of training blocks: the tokens at their depths, and where the target predicts them.

Legend: B rows, T positions, A anchors per row, M = B * A blocks, K depths.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from heads.api.batch import TrainBatch
from heads.nn.anchors import Anchors


@dataclass
class Taught:
    """The labels of M blocks. labels, parents [M, K] int64: the token at each depth and the one
    before it; states_at [M, K] int64: the flat position from whose state the target draws it; mask
    [M, K] bool: supervised; scale [M]."""

    labels: Tensor
    parents: Tensor
    states_at: Tensor
    mask: Tensor
    scale: Tensor

    @classmethod
    def of(cls, batch: TrainBatch, anchors: Anchors, depths: int) -> Taught:
        """The labels of a batch's blocks, at depths 1..K after their roots."""
        rows, length = batch.tokens.shape
        ahead = torch.arange(1, depths + 1, device=batch.tokens.device)
        row = torch.arange(rows, device=batch.tokens.device)[:, None, None]
        # [B, A, K]; clamped places are not supervised
        states_at = (anchors.last[..., None] + ahead).clamp(max=length - 1)
        label_at = (states_at + 1).clamp(max=length - 1)
        supervised = batch.supervised_ahead(depths).unflatten(0, (rows, length))  # [B, T, K]
        mask = supervised[row[..., 0], anchors.last] & anchors.valid[..., None]
        return cls(
            batch.tokens[row, label_at].flatten(0, 1),
            batch.tokens[row, states_at].flatten(0, 1),
            (row * length + states_at).flatten(0, 1),
            mask.flatten(0, 1),
            anchors.scale.flatten(),
        )
