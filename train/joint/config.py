"""The settings of training the target together with a drafter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Le, Lt

from heads.api.config import PositiveWeight, Rows, UnitInterval, config


@config("joint")
@dataclass(frozen=True)
class JointConfig:
    """Joint training of the target's layers through LoRA. It makes a new target; the original's
    answers are not kept."""

    mode: Literal["none", "lora"] = "none"
    """none: the target is frozen. lora: low-rank updates of its layers are trained with the drafter
    and merged at the end."""
    rank: Rows = 16
    """Rank of the updates (>= 1)."""
    alpha: PositiveWeight = 32.0
    """The updates are multiplied by alpha / rank (> 0)."""
    modules: tuple[str, ...] = ()
    """Last parts of the names of the linear layers to update, such as q_proj; empty: all of the
    decoder layers'."""
    heads_weight: PositiveWeight = 0.2
    """Weight of the drafter's loss in the target's gradient, relative to a weight of 1 for staying
    close to the original (lambda_0 of Medusa-2; above 0). The drafter's own gradient does not
    depend on it."""
    heads_first: Annotated[float, Ge(0), Lt(1)] = 0.3
    """Share of the steps, at the start, that train only the drafter (0 to below 1)."""
    ramp: UnitInterval = 0.2
    """Share of the steps, after those, in which heads_weight rises from 0 to its value (0 to 1)."""
    rate_ratio: Annotated[float, Ge(0.001), Le(1000)] = 4.0
    """Ratio of the drafter's learning rate (optim.lr) to that of the target's updates (> 0), which
    AdamW trains with optim.kind=muon too."""

    @property
    def on(self) -> bool:
        """Whether the target is trained."""
        return self.mode != "none"

    def weight_at(self, progress: float) -> float | None:
        """The drafter's weight in the target's gradient after a share `progress` of the steps; None
        while it is frozen."""
        behind = progress - self.heads_first
        if behind < 0:
            return None
        return self.heads_weight * (min(1.0, behind / self.ramp) if self.ramp else 1.0)
