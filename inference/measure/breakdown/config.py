"""What is asked of the loss split: `bench.lost`."""

from __future__ import annotations

from dataclasses import dataclass

from heads.api.config import NonNegativeFloat, NonNegativeInt, PositiveInt, config


@config("bench.lost")
@dataclass(frozen=True)
class LostConfig:
    """Whether and on how many prompts the missing speed is explained."""

    enabled: bool = False
    """Write the block `lost` into report.json, and transcripts.json beside it."""
    prompts_per_domain: PositiveInt = 4
    """Measured prompts of each domain that every drafter decodes once more."""
    temperatures: tuple[NonNegativeFloat, ...] = ()
    """Further temperatures at which these prompts are decoded, for instance [1]."""
    transcripts: NonNegativeInt = 2
    """Answers per domain that are kept token by token with both models' candidates."""
    candidates: PositiveInt = 5
    """Best candidates of either model that a transcript shows."""
    repeats: PositiveInt = 25
    """Timed calls per width, where the cost of a wider verification is not among bench.costs."""
