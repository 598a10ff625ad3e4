"""Which uses are made of records. Each is a switch; with all of them off, answers stay as they are."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from heads.api.errors import UserError


@dataclass(frozen=True)
class FeedbackConfig:
    """What training learns from where drafts failed. The numbers below a switch count only when it is on."""

    records: tuple[str, ...] = ()
    """`headstart feedback`: folders of records, one for each folder of answers and in that order; empty: <answers>/records."""
    answers: tuple[str, ...] = ()
    """`headstart feedback`: folders of answers that the records are of; empty: <run>/generate. Not read with `sequences`."""
    sequences: bool = False
    """Take the documents from the records themselves, such as those of a server, instead of from answers."""
    token_weights: bool = False
    """More loss on tokens that the drafter missed, by how unlikely it held them and by what an error at that depth costs."""
    error_weight: float = 4.0
    """How much heavier than an accepted token an error at depth 1 is whose right token the drafter held impossible (>= 0)."""
    anchor_weights: bool = False
    """More loss on drafts from the roots whose drafts failed: block drafters draw their anchors by it."""
    root_weight: float = 2.0
    """How much heavier than other roots one is whose draft failed at once (>= 0)."""
    replay: bool = False
    """Train on first errors and what is near them alone: documents end behind their last error, those without any are left out."""
    replay_before: int = 2
    """Tokens before an error that stay supervised (>= 0)."""
    replay_after: int = 2
    """Tokens behind it that stay supervised (>= 0)."""
    domain_weights: bool = False
    """Weigh whole domains by the verify passes that are lost in them on the user's traffic."""
    domain_power: float = 1.0
    """Exponent of that weight: 0 changes nothing, 1 is in proportion to what is lost."""
    traffic: Mapping[str, float] = field(default_factory=dict)
    """Share of the traffic's tokens per domain, in any unit; domains that are not named have none. Empty: as in the answers."""
    hard_prompts: float = 0.0
    """Share of the prompts, those with the most verify passes per token, that are written to hard_prompts.jsonl (0 to 1)."""

    branches: int = 0
    """Branches per answer: the target answers on from a token that it refused, though it held it likely (0: none). In rounds it
    does so at once; `headstart feedback` writes them to branches.jsonl for the next generation."""
    branch_likely: float = 0.05
    """The least probability that the target must have given to the refused token (above 0, up to 1)."""
    branch_within: int = 32
    """Only errors within so many tokens of an answer's begin are branched from: what stands before is not learned again."""

    variations: int = 0
    """Prompts that the target writes itself, per prompt that there is (0: none): they begin as the ones begin whose answers cost
    the most verify passes per token. In rounds they are answered at once; `headstart feedback` writes them to variations.jsonl."""
    variation_begin: int = 6
    """At most so many tokens of the user's text are taken over; how many is drawn for each (at least 1)."""
    variation_tokens: int = 256
    """Texts that do not end within so many tokens are left out (at least 1)."""
    variation_temperature: float = 0.8
    """Temperature at which the target writes them (above 0)."""

    def __post_init__(self) -> None:
        for name in ("error_weight", "root_weight", "replay_before", "replay_after", "domain_power"):
            value = getattr(self, name)
            if not (value >= 0 and math.isfinite(value)):
                raise UserError(f"feedback.{name} must be a number that is not negative; given {value}.")
        if not 0.0 <= self.hard_prompts <= 1.0:
            raise UserError(f"feedback.hard_prompts must lie in [0, 1]; given {self.hard_prompts}.")
        if not 0.0 < self.branch_likely <= 1.0:
            raise UserError(f"feedback.branch_likely must lie above 0 and be at most 1; given {self.branch_likely}.")
        if self.branches < 0 or self.branch_within < 1:
            raise UserError(
                "feedback.branches must not be negative, and feedback.branch_within at least 1; given "
                f"{self.branches} and {self.branch_within}."
            )
        if self.variations < 0 or self.variation_begin < 1 or self.variation_tokens < 1 or not self.variation_temperature > 0:
            raise UserError(
                "feedback.variations must not be negative, variation_begin and variation_tokens at least 1, and "
                f"variation_temperature above 0; given {self.variations}, {self.variation_begin}, {self.variation_tokens} and "
                f"{self.variation_temperature}."
            )
        wrong = {name: share for name, share in self.traffic.items() if not (share >= 0 and math.isfinite(share))}
        if wrong or (self.traffic and not sum(self.traffic.values())):
            raise UserError(f"feedback.traffic needs shares of at least 0, one of them above it; given {dict(self.traffic)}.")
        if self.traffic and not self.domain_weights:
            raise UserError("feedback.traffic is given, but feedback.domain_weights, which reads it, is off. Switch it on.")

    @property
    def weighs(self) -> bool:
        """Whether tokens get weights."""
        return self.token_weights or self.domain_weights
