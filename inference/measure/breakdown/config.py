"""What is asked of the loss split: `bench.lost`."""

from __future__ import annotations

from dataclasses import dataclass

from heads.api.config import NonNegativeFloat, NonNegativeInt, PositiveInt, config


@config("bench.lost")
@dataclass(frozen=True)
class LostConfig:
    """Whether the missing speed is explained, and on how many prompts both models' distributions
    are compared for it."""

    enabled: bool = False
    """Write the block `lost` into report.json, and transcripts.json beside it."""
    prompts_per_domain: PositiveInt = 4
    """Measured prompts of each domain that are decoded once more by every drafter, with all
    distributions kept."""
    temperatures: tuple[NonNegativeFloat, ...] = ()
    """Further temperatures at which these prompts are decoded, for instance [1]; the measurement's
    own always is."""
    transcripts: NonNegativeInt = 2
    """Answers per domain that are kept token by token with both models' best candidates; 0:
    none."""
    candidates: PositiveInt = 5
    """Best candidates of either model that a transcript shows."""
    repeats: PositiveInt = 25
    """Timed calls per width, where the cost of a wider verification is not among bench.costs."""
