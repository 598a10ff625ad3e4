"""The uses of records. Each is a switch; if all of them are off, answers stay as they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from annotated_types import Ge, Le

from heads.api.config import Count, Fraction, Size, Tokens, UnitInterval, Warmth, Weight, config
from heads.api.errors import UserError


@config("feedback")
@dataclass(frozen=True)
class FeedbackConfig:
    """What training learns from where drafts failed. The numbers below a switch count only when it
    is on."""

    records: tuple[str, ...] = ()
    """`headstart feedback`: folders of records, one for each folder of answers and in that order;
    empty: <answers>/records."""
    answers: tuple[str, ...] = ()
    """`headstart feedback`: folders of answers that the records are of; empty: <run>/generate. Not
    read with `sequences`."""
    sequences: bool = False
    """Take the documents from the records themselves, such as a server's, not from answers."""
    token_weights: bool = False
    """More loss on tokens that the drafter missed, by how unlikely it held them and by what an
    error at that depth costs."""
    error_weight: Weight = 4.0
    """How much heavier than an accepted token an error at depth 1 is whose right token the drafter
    held impossible."""
    anchor_weights: bool = False
    """More loss on drafts from roots whose drafts failed: block drafters draw anchors by it."""
    root_weight: Weight = 2.0
    """How much heavier than other roots one is whose draft failed at once."""
    replay: bool = False
    """Train on first errors and what is near them alone: documents end behind their last error,
    those without any are left out."""
    replay_before: Size = 2
    """Tokens before an error that stay supervised."""
    replay_after: Size = 2
    """Tokens behind it that stay supervised."""
    domain_weights: bool = False
    """Weigh whole domains by the verify passes that are lost in them on the user's traffic."""
    domain_power: Annotated[float, Ge(0), Le(10)] = 1.0
    """Exponent of that weight: 0 changes nothing, 1 is in proportion to what is lost."""
    traffic: Mapping[str, Weight] = field(default_factory=dict)
    """Share of the traffic's tokens per domain, in any unit; domains that are not named have none.
    Empty: as in the answers."""
    hard_prompts: UnitInterval = 0.0
    """Share of the prompts, those with the most verify passes per token, that are written to
    hard_prompts.jsonl."""

    branches: Count = 0
    """Branches per answer: the target answers on from a token that it refused, though it held it
    likely (0: none). In rounds it does so at once; `headstart feedback` writes them to
    branches.jsonl for the next generation."""
    branch_likely: Fraction = 0.05
    """The least probability that the target must have given to the refused token."""
    branch_within: Tokens = 32
    """Only errors within so many tokens of an answer's begin are branched from: what stands before
    is not learned again."""

    variations: Count = 0
    """Prompts that the target writes itself, per prompt that there is (0: none): they begin as the
    ones begin whose answers cost the most verify passes per token. In rounds they are answered at
    once; `headstart feedback` writes them to variations.jsonl."""
    variation_begin: Tokens = 6
    """At most so many tokens of the user's text are taken over; how many is drawn for each."""
    variation_tokens: Tokens = 256
    """Texts that do not end within so many tokens are left out."""
    variation_temperature: Warmth = 0.8
    """Temperature at which the target writes them."""

    def __post_init__(self) -> None:
        if self.traffic and not sum(self.traffic.values()):
            raise UserError(
                "feedback.traffic needs shares of at least 0, one of them above it; given "
                f"{dict(self.traffic)}."
            )
        if self.traffic and not self.domain_weights:
            raise UserError(
                "feedback.traffic is given, but feedback.domain_weights, which reads it, is off. "
                "Switch it on."
            )

    @property
    def weighs(self) -> bool:
        """Whether tokens get weights."""
        return self.token_weights or self.domain_weights
