"""The loss of multi-token prediction: the depths of an unrolled chain, weighed.

The sum over depths k of beta^(k-1), normalised to sum to one, times the cross entropy of token
t+k+1; beta = 1 is DeepSeek-V3's 1/D (2412.19437), beta = 0.6 is FastMTP's (2509.18362).

Legend: B rows, M selected states, D depths, H hidden, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from heads.api.batch import LossOutput, TrainBatch
from heads.api.config import Depth, Fraction, config
from heads.nn.feature import base
from heads.nn.feature.chain import ChainDrafter


@config("head")
@dataclass(frozen=True)
class DepthConfig:
    """The trained depths and their weights."""

    depths: Depth = 4
    """Number of trained depths (>= 1)."""
    beta: Fraction = 1.0
    """Depth k has the weight beta^(k-1), normalised to a sum of one (0 < beta <= 1)."""
    soft_labels: bool = True
    """Train on the target's distribution instead of the token that it sampled."""


class DepthDrafter(ChainDrafter):
    """Base of the kinds with this loss; their configuration is a `DepthConfig`."""

    def loss(self, batch: TrainBatch) -> LossOutput:
        """Sum over depths k of their share times the cross entropy of supervised tokens t+k+1."""
        config: DepthConfig = self.config
        depths = torch.arange(config.depths, device=batch.tokens.device, dtype=torch.float32)
        weights = config.beta**depths
        weights, judge = weights / weights.sum(), partial(self._judge, batch)
        unrolled = self.chain.unroll(batch, config.depths)
        columns = self.info.vocab_size
        return base.unrolled_loss(batch, unrolled, columns, weights, judge, frozen=True)

    def _judge(
        self, batch: TrainBatch, outputs: Tensor, states_at: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Cross entropy and correctness [D, M] of outputs [D, M, H] at states [M]; see `Judge`."""
        logits, labels = self.logits(outputs), base.next_tokens(batch, states_at)  # [D, M, V]
        hard = 0.0 if self.config.soft_labels else 1.0
        values, right = base.label_loss(batch, logits, labels, states_at, hard)
        return values, torch.ones_like(states_at, dtype=torch.bool), right
