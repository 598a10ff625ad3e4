"""The engine in plain torch, for debugging and as the reference for other engines."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from heads.api.batch import LossOutput, TrainBatch
from heads.api.drafter import TrainableDrafter
from train.distributed import World
from train.engines.base import EngineConfig, Objective, cpu_copies, fill_gradients
from train.engines.shards import AnyPart, StatePart, collect, distribute, whole_spans
from train.optim import OptimConfig, make_optimizer, set_rate


class TorchEngine:
    """Plain torch: every process holds everything; gradients are summed once per step."""

    sharded = False

    def __init__(
        self, drafter: TrainableDrafter, config: EngineConfig, optim: OptimConfig, world: World
    ) -> None:
        self.drafter, self.world, self.clip = drafter, world, optim.clip
        self.objective = Objective(drafter, config, world.device.type)
        self.trained = {name: p for name, p in drafter.named_parameters() if p.requires_grad}
        self.optimizer = make_optimizer(drafter, optim)

    def forward_backward(self, batch: TrainBatch, supervised: int, last: bool) -> LossOutput:
        loss = self.objective(batch)
        (loss / supervised).backward()
        return LossOutput(loss.detach(), self.objective.metrics)

    def step(self, rate: float) -> float:
        """See `TrainEngine`. A norm that is not finite is returned without an update."""
        self._add_gradients()
        norm = float(nn.utils.clip_grad_norm_(self.trained.values(), self.clip or math.inf))
        if math.isfinite(norm):
            set_rate(self.optimizer, rate)
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def _add_gradients(self) -> None:
        fill_gradients(self.trained.values())
        if self.world.size == 1:
            return
        gradients = [p.grad for p in self.trained.values() if p.grad is not None]
        flat = self.world.add(torch.cat([gradient.flatten() for gradient in gradients]))
        sums = flat.split([gradient.numel() for gradient in gradients])
        for gradient, part in zip(gradients, sums, strict=True):
            gradient.copy_(part.view_as(gradient))

    def weights(self) -> dict[str, Tensor]:
        return cpu_copies(self.drafter.state_dict()) if self.world.is_main else {}

    def optimizer_state(self) -> StatePart:
        """See `TrainEngine`: everything, in every process."""
        return collect(self.optimizer, whole_spans(self.trained))

    def load_optimizer_state(self, parts: Sequence[AnyPart]) -> None:
        shapes = {name: tuple(weight.shape) for name, weight in self.trained.items()}
        distribute(self.optimizer, whole_spans(self.trained), shapes, parts)

    def close(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
