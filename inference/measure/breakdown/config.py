"""What is asked of the loss split: `bench.lost`."""

from __future__ import annotations

from dataclasses import dataclass

from heads.api.errors import UserError


@dataclass(frozen=True)
class LostConfig:
    """Whether the missing speed is explained, and on how many prompts both models' distributions
    are compared for it."""

    enabled: bool = False
    """Write the block `lost` into report.json, and transcripts.json beside it."""
    prompts_per_domain: int = 4
    """Measured prompts of each domain that are decoded once more by every drafter, with all
    distributions kept."""
    temperatures: tuple[float, ...] = ()
    """Further temperatures at which these prompts are decoded, for instance [1]; the measurement's
    own always is."""
    transcripts: int = 2
    """Answers per domain that are kept token by token with both models' best candidates; 0:
    none."""
    candidates: int = 5
    """Best candidates of either model that a transcript shows."""
    repeats: int = 25
    """Timed calls per width, where the cost of a wider verification is not among bench.costs."""

    def __post_init__(self) -> None:
        for name, least in (
            ("prompts_per_domain", 1),
            ("transcripts", 0),
            ("candidates", 1),
            ("repeats", 1),
        ):
            if getattr(self, name) < least:
                raise UserError(
                    f"bench.lost.{name} must be at least {least}; given: {getattr(self, name)}."
                )
        if any(value < 0 for value in self.temperatures):
            raise UserError(
                f"bench.lost.temperatures must be 0 or more; given: {list(self.temperatures)}."
            )
