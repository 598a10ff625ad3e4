"""What is said about training the target together with a drafter."""

from __future__ import annotations

from dataclasses import dataclass

from heads.api.errors import UserError, suggest

MODES = ("none", "lora")


@dataclass(frozen=True)
class JointConfig:
    """Joint training of the target's layers through LoRA. It makes a new target; the original's answers are not kept."""

    mode: str = "none"
    """none: the target is frozen. lora: low-rank updates of its layers are trained with the drafter and merged at the end."""
    rank: int = 16
    """Rank of the updates (>= 1)."""
    alpha: float = 32.0
    """The updates are multiplied by alpha / rank (> 0)."""
    modules: tuple[str, ...] = ()
    """Last parts of the names of the linear layers to update, as q_proj; empty: all of the decoder layers'."""
    heads_weight: float = 0.2
    """Weight of the drafter's loss in the target's gradient, beside a weight of 1 for staying close to the original (lambda_0 of
    Medusa-2; above 0). The drafter's own gradient does not depend on it."""
    heads_first: float = 0.3
    """Share of the steps, at the start, in which only the drafter is trained (0 to below 1)."""
    ramp: float = 0.2
    """Share of the steps, after those, in which heads_weight rises from 0 to its value (0 to 1)."""
    rate_ratio: float = 4.0
    """The drafter's learning rate (optim.lr) is this many times that of the target's updates (> 0)."""

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise UserError(f"joint.mode '{self.mode}' is unknown.{suggest(self.mode, MODES)}")
        if self.rank < 1:
            raise UserError(f"joint.rank must be at least 1; given: {self.rank}.")
        for name in ("alpha", "heads_weight", "rate_ratio"):
            if getattr(self, name) <= 0:
                raise UserError(f"joint.{name} must be above 0; given: {getattr(self, name)}.")
        if not 0.0 <= self.heads_first < 1.0 or not 0.0 <= self.ramp <= 1.0:
            raise UserError(
                "joint.heads_first must be at least 0 and below 1, and joint.ramp between 0 and 1; given: "
                f"{self.heads_first} and {self.ramp}."
            )

    @property
    def on(self) -> bool:
        """Whether the target is trained."""
        return self.mode != "none"

    def weight_at(self, progress: float) -> float | None:
        """The drafter's weight in the target's gradient after a share `progress` of the steps; None while it is frozen."""
        behind = progress - self.heads_first
        if behind < 0:
            return None
        return self.heads_weight * (min(1.0, behind / self.ramp) if self.ramp else 1.0)
