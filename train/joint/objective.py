"""Training a drafter and its target's layers together: Medusa-2's objective for any trainable kind
(2401.10774, section 2.2.2).

    L = KL(p_original || p_updated) + lambda(step) * (the drafter's own loss, on the updated
    target's features)

The original is the same model with its updates switched off, so only the answers are needed to stay
close to it (self-distillation). At first only the drafter is trained, while the updates are still
zero; then lambda rises to its value. lambda scales the gradient that flows through the features
into the target; the drafter's own gradient is never scaled. With `early_exit`, whose loss reads the
tap at its exit, this is LayerSkip's finetuning.

Legend: B rows, T positions, M selected positions, H hidden, V vocabulary, n taps.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from heads.api.batch import LossOutput, TrainBatch
from heads.api.drafter import TrainableDrafter
from heads.api.errors import UserError
from heads.api.features import FeatureSpec
from heads.kernels.reference.row_losses import FORWARD_KL, ROW_LOSSES
from heads.nn import losses
from train.data.loader import PackedBatch
from train.features.store.batches import batch_on
from train.joint.backbone import Backbone
from train.joint.config import JointConfig
from train.optim import set_rate_scale

DRAFTER, UPDATES = "drafter.", "updates."
"""Prefixes of the two parts' names in saved states."""


@dataclass
class PlainTokens:
    """Batches without features: joint training computes them itself, with their graph."""

    device: torch.device

    def batch(self, packed: PackedBatch, step: int = 0) -> TrainBatch:
        """`packed` on the device; the same in every step."""
        return batch_on(packed, self.device)


class JointDrafter(TrainableDrafter):
    """A drafter and the updates of its target: one module with one loss for engines. dtype: of the
    drafter's features, as in `OnlineFeatures`."""

    kind: ClassVar[str] = "joint"

    def __init__(
        self, drafter: TrainableDrafter, backbone: Backbone, config: JointConfig, dtype: torch.dtype
    ) -> None:
        super().__init__(drafter.config, drafter.info)
        self.drafter, self.needs, self.joint = drafter, drafter.needs, config
        # A parameter's name in a module must not contain dots.
        self.updates = nn.ParameterDict(
            {name.replace(".", "/"): value for name, value in backbone.parameters.items()}
        )
        for value in self.updates.values():
            set_rate_scale(value, 1.0 / config.rate_ratio)
        # in a list, so that the target is no part of this module
        self._backbone, self._dtype = [backbone], dtype
        self._seen = FeatureSpec(drafter.needs.taps, last_hidden=True)

    @property
    def backbone(self) -> Backbone:
        return self._backbone[0]

    def loss(self, batch: TrainBatch) -> LossOutput:
        """The objective of the module on tokens without features; see `TrainableDrafter`."""
        weight = self.joint.weight_at(batch.progress)
        with torch.no_grad(), self.backbone.original():
            original = self._features(batch)
        if weight is None:
            output = self._drafter_loss(batch, *original, 0.0)
            # Both engines must get a gradient of zero, not none.
            nothing = torch.stack([value.sum() for value in self.updates.values()]).sum() * 0.0
            return LossOutput(output.loss_sum + nothing, output.metrics)
        taps, hidden = self._features(batch)
        drift, count = self._drift(batch, original[1], hidden)
        output = self._drafter_loss(batch, taps, hidden, weight)
        return LossOutput(
            drift + output.loss_sum, {**output.metrics, "target_kl": (drift.detach(), count)}
        )

    def _features(self, batch: TrainBatch) -> tuple[Tensor | None, Tensor]:
        """taps [B, T, n, H] and last_hidden [B, T, H] of the present target, for the drafter."""
        target = self.backbone.target
        autocast = self._dtype == torch.bfloat16 and target.dtype == torch.float32
        with torch.autocast(target.device.type, torch.bfloat16, enabled=autocast):
            taps, hidden = target.differentiable_features(
                batch.tokens, batch.positions, batch.segments, self._seen
            )
        assert hidden is not None
        return None if taps is None else taps.to(self._dtype), hidden.to(self._dtype)

    def _drafter_loss(
        self, batch: TrainBatch, taps: Tensor | None, hidden: Tensor, weight: float
    ) -> LossOutput:
        """The drafter's loss on these features; `weight` of its gradient flows into the target."""
        needs = self.needs
        return self.drafter.loss(
            replace(
                batch,
                taps=None if taps is None else _scale(taps, weight),
                last_hidden=_scale(hidden, weight) if needs.last_hidden or needs.logits else None,
                target_logits=self._logits_for_drafter if needs.logits else None,
            )
        )

    @torch.no_grad()
    def _logits_for_drafter(self, hidden: Tensor) -> Tensor:
        return self._logits(hidden)

    def _logits(self, hidden: Tensor) -> Tensor:
        """The target's logits [M, V] at last hidden states [M, H]. The LM head is never updated."""
        target = self.backbone.target
        with torch.autocast(hidden.device.type, enabled=False):
            return target.weights.logits(hidden.to(target.dtype))

    def _drift(self, batch: TrainBatch, before: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
        """Sum of KL(p_original || p_updated) over the supervised tokens, and their number."""
        wanted = batch.supervised(1).flatten()
        rows = wanted.nonzero().squeeze(1)
        before, after = before.flatten(0, 1), after.flatten(0, 1)

        def part(chosen: Tensor) -> losses.Sums:
            found = ROW_LOSSES(
                self._logits(after[chosen]),
                self._logits_for_drafter(before[chosen]),
                names=(FORWARD_KL,),
            )
            return (found[FORWARD_KL].sum(),)

        (total,) = losses.sum_over_rows(part, rows, self.info.vocab_size)
        return total, wanted.sum()


class _ScaledGradient(torch.autograd.Function):
    """The identity, with its gradient multiplied by a number."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: float) -> Tensor:
        ctx.weight = weight
        return states.view_as(states)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.weight, None


def _scale(states: Tensor, weight: float) -> Tensor:
    scaled: Tensor = _ScaledGradient.apply(states, weight)
    return scaled


def require_trainable_features(drafter: TrainableDrafter) -> None:
    """Raise `UserError` for a drafter that itself runs target layers without their updates."""
    if drafter.runs_target_layers:
        raise UserError(
            f"kind '{drafter.kind}' with layers left out cannot be trained jointly: its loss runs "
            "the target's layers itself, without their updates. Use head.exit_layer (an early "
            "exit), or joint=none."
        )


def split_state(state: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A `JointDrafter`'s state -> the drafter's own, and the updates by their target's names."""
    drafter, updates = (
        {name.removeprefix(start): v for name, v in state.items() if name.startswith(start)}
        for start in (DRAFTER, UPDATES)
    )
    return drafter, {name.replace("/", "."): value for name, value in updates.items()}
