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
    """How training uses the places where drafts failed. The numbers below a switch count only when
    it is on."""

    records: tuple[str, ...] = ()
    """`headstart feedback`: folders of records, one for each folder of answers and in the same
    order; empty: <answers>/records."""
    answers: tuple[str, ...] = ()
    """`headstart feedback`: folders of the answers that the records belong to; empty:
    <run>/generate. Not read with `sequences`."""
    sequences: bool = False
    """Take the documents from the records, such as a server's, instead of from answers."""
    token_weights: bool = False
    """Weight the loss more on tokens that the drafter missed, by how unlikely it considered them
    and by the cost of an error at that depth."""
    error_weight: Weight = 4.0
    """Extra weight, beyond the 1 of an accepted token, of an error at depth 1 whose right token the
    drafter considered impossible."""
    anchor_weights: bool = False
    """Weight the loss more on drafts from roots whose drafts failed; block drafters draw anchors by
    these weights."""
    root_weight: Weight = 2.0
    """Extra weight, beyond the 1 of other roots, of a root whose draft failed at depth 1."""
    replay: bool = False
    """Train only on first errors and the tokens near them: documents end after their last error,
    and those without errors are left out."""
    replay_before: Size = 2
    """Tokens before an error that stay supervised (replay)."""
    replay_after: Size = 2
    """Tokens after an error that stay supervised (replay)."""
    domain_weights: bool = False
    """Weight whole domains by the verify passes that are lost in them on the user's traffic."""
    domain_power: Annotated[float, Ge(0), Le(10)] = 1.0
    """Exponent of the domain weights: 0 changes nothing, 1 is proportional to the lost passes."""
    traffic: Mapping[str, Weight] = field(default_factory=dict)
    """Share of the traffic's tokens per domain, in any unit; domains that are not named have share
    0. Empty: the shares in the answers."""
    hard_prompts: UnitInterval = 0.0
    """Share of the prompts, those with the most verify passes per token, that are written to
    hard_prompts.jsonl."""

    branches: Count = 0
    """Branches per answer (0: none): the target continues from a token that it refused although it
    considered it likely. In rounds it does so at once; `headstart feedback` writes the branches to
    branches.jsonl for the next generation."""
    branch_likely: Fraction = 0.05
    """Smallest probability that the target must have given to the refused token."""
    branch_within: Tokens = 32
    """Branch only from errors within this many tokens of an answer's beginning: the text before a
    branch is not trained on again."""

    variations: Count = 0
    """Number of prompts that the target writes per existing prompt (0: none): they begin like the
    prompts whose answers cost the most verify passes per token. In rounds they are answered at
    once; `headstart feedback` writes them to variations.jsonl."""
    variation_begin: Tokens = 6
    """Maximum number of tokens that are taken over from the user's text; the number is drawn for
    each one."""
    variation_tokens: Tokens = 256
    """Leave out texts that do not end within this many tokens."""
    variation_temperature: Warmth = 0.8
    """Temperature at which the target writes the prompts."""

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
