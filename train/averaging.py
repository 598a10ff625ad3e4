"""The running mean of a drafter's weights over a training, which is measured and kept in their
place (`train.average`).

The mean is taken every few steps in the main process, from `TrainEngine.weights`, so that it is the
same under every engine. With d the decay per step and k the steps between two of them, the n-th
weights (from 1) count max(1 - d^k, 1/n) in the mean: a plain mean first, then an exponential one,
in which the initial weights leave no trace (Polyak averaging; Busbridge et al., 2307.13813, on the
decay at other step sizes).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from train.engines.base import TrainEngine


@dataclass
class WeightAverage:
    """The mean so far. decay: per step, 0 for no mean; every: steps between the weights that enter
    it; taken: how many entered; mean: as `TrainEngine.weights`, float32 on the CPU, empty except in
    the main process."""

    decay: float = 0.0
    every: int = 1
    taken: int = 0
    mean: dict[str, Tensor] = field(default_factory=dict)

    def follow(self, step: int, engine: TrainEngine) -> None:
        """Take the weights after update `step` (from 1) into the mean if it is their turn.
        Collective."""
        if self.decay == 0 or step % self.every:
            return
        self.taken += 1
        share = max(1 - self.decay**self.every, 1 / self.taken)
        weights = engine.weights()
        self.mean = {
            name: mixed(self.mean.get(name), value, share) for name, value in weights.items()
        }

    def weights(self, engine: TrainEngine) -> dict[str, Tensor]:
        """What is measured and kept: the mean, or before there is one the weights themselves.
        Collective."""
        return dict(self.mean) if self.taken else engine.weights()

    def restore(self, mean: Mapping[str, Tensor], taken: int) -> None:
        """Continue a saved mean."""
        if self.decay:
            self.mean, self.taken = dict(mean), taken


def mixed(mean: Tensor | None, value: Tensor, share: float) -> Tensor:
    """The mean with `value` added at a share of it; integers are the newest."""
    if mean is None or not value.is_floating_point():
        return value
    return mean.lerp(value, share)
