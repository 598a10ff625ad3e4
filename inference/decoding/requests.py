"""The decoder's input and output: requests, completions, a record per pass."""

from __future__ import annotations

from dataclasses import dataclass, field

from heads.api.errors import UserError
from inference.decoding.logprobs import Logprobs
from inference.decoding.pass_details import PassDetails
from inference.decoding.sampling.distribution import SamplingSettings
from inference.decoding.structured.constraint import Constraint

DEAD_END = "dead end"
"""How an answer ends whose grammar allows no further token."""


@dataclass(frozen=True)
class Request:
    """One sequence to continue: the prompt's ids; `seed` keys its noise (63 bits).

    sampling: separate settings, in a session; None: the engine's. ignore_eos: the answer goes on
    after end-of-text tokens, up to max_new_tokens. constraint: what the answer must follow; None:
    the engine's (`decode.structure`). min_tokens: end of text is forbidden before this many new
    tokens. logprobs: the log-probabilities to compute, and their results.
    """

    index: int
    tokens: tuple[int, ...]
    seed: int
    max_new_tokens: int
    sampling: SamplingSettings | None = None
    ignore_eos: bool = False
    constraint: Constraint | None = None
    min_tokens: int = 0
    logprobs: Logprobs | None = None


def require_known_tokens(request: Request, vocab_size: int) -> None:
    """Raise `UserError` for a prompt with token ids outside the vocabulary."""
    odd = next((token for token in request.tokens if not 0 <= token < vocab_size), None)
    if odd is not None:
        raise UserError(
            f"token ids go from 0 to {vocab_size - 1}; the prompt has {odd}. Was it made with "
            "another tokenizer?"
        )


@dataclass(frozen=True)
class PassRecord:
    """One verify pass of one row: drafted tokens committed, tokens committed (bonus included), and
    whether a drafted token was rejected.

    nodes: tokens verified, the root included; live: drafted levels that counted (adaptive length).
    Both are 0 if not recorded. details: what was drafted, if requested. arm: see `Completion`.
    confidence: see `inference.tune.confidence`; empty if not recorded.
    """

    accepted: int
    committed: int
    rejected: bool
    nodes: int = field(default=0, compare=False)
    live: int = field(default=0, compare=False)
    details: PassDetails | None = field(default=None, compare=False)
    arm: int | None = field(default=None, compare=False)
    confidence: tuple[float, ...] = field(default=(), compare=False)


@dataclass
class Completion:
    """A finished answer: its new tokens (the end-of-text token included), why it ended, its passes.

    finish: "stop" (end of text), "length" (no budget left), "cancelled" or `DEAD_END`. The first
    token comes from prefill, so len(tokens) == 1 + sum of committed tokens over the passes, unless
    the request was cancelled before its prefill. arm: which of two drafters drafts, 0 or 1, for a
    request that got its row while a pair was drafting (`inference.decoding.pair`); None for others.
    """

    request: Request
    tokens: list[int] = field(default_factory=list)
    finish: str = ""
    passes: list[PassRecord] = field(default_factory=list)
    arm: int | None = None

    @property
    def done(self) -> bool:
        return self.finish != ""

    @property
    def tau(self) -> float:
        """Committed tokens per verify pass; 1.0 if nothing was verified."""
        if not self.passes:
            return 1.0
        return sum(item.committed for item in self.passes) / len(self.passes)
