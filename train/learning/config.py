"""The settings of learning from a server's traffic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Gt, Le, Lt

from heads.api.config import (
    Count,
    Fraction,
    NonNegativeFloat,
    OpenFraction,
    PositiveInt,
    Seed,
    Timeout,
    TokenTotal,
    config,
)
from heads.api.errors import UserError

Niceness = Annotated[int, Ge(0), Le(19)]


@config("learn")
@dataclass(frozen=True)
class LearnConfig:
    """Settings of `headstart learn`."""

    server: str = ""
    """Address of the running server, such as http://127.0.0.1:8000."""
    drafter: str = ""
    """For an engine that loads exports, in place of learn.server: the checkpoint whose export the
    engine serves, or its name in this run. Candidates are compared on held-out traffic and exported
    by export.engine. The traffic is sampled by `headstart serve` with serve.engine."""
    folder: str = ""
    """Folder of the journal, the sampled traffic and the candidates; empty: the folder that the
    server writes samples to."""
    key_variable: str = "HEADSTART_SERVE_TOKEN"
    """Environment variable with the server's token, if it needs one."""
    timeout: Timeout = 120.0
    """Seconds after which a request to the server counts as failed; the server may load a candidate
    in this time."""
    verify: bool = True
    """Verify the certificate of an https server."""
    least_tokens: Annotated[int, Ge(1), Le(1_000_000_000)] = 20_000
    """A cycle begins once this many tokens of answers have been sampled."""
    most_tokens: Annotated[int, Ge(1), Le(1_000_000_000)] = 200_000
    """Maximum tokens of answers that a cycle learns from; it takes the newest ones."""
    all_tokens: TokenTotal = 0
    """Maximum tokens of answers that all cycles together learn from; 0: no limit."""
    client_share: Fraction = 0.25
    """Largest share of one client in a cycle's tokens and in a comparison's answers, but at least
    1/n with n clients. Clients are told apart as in the server's fairness. 1: no limit, for a
    server with one user."""
    held_out: Annotated[float, Gt(0), Le(0.5)] = 0.2
    """Share of the prompts that is held out of the training: one half chooses the checkpoint, the
    other half measures the candidate."""
    held_out_prompts: PositiveInt = 64
    """Maximum number of prompts in each half."""
    least_gain: Annotated[float, Ge(0), Lt(10)] = 0.0
    """Amount by which a candidate's tau on held-out traffic must exceed the served drafter's before
    the server compares both."""
    trial_share: OpenFraction = 0.5
    """Share of the server's requests that draft with the candidate during a comparison."""
    error_rate: OpenFraction = 0.01
    """Probability of ever accepting a candidate that is not better, per candidate and for any
    number of looks."""
    most_pairs: PositiveInt = 2000
    """Answers per drafter after which a comparison without a result ends; the candidate is then
    rejected."""
    look_seconds: Timeout = 5.0
    """Seconds between two looks at the traffic or at a comparison."""
    pause_seconds: Timeout = 60.0
    """Seconds until the learner tries again if the disk is full or the server does not answer."""
    free_megabytes: NonNegativeFloat = 512.0
    """The learner pauses while its disk has less free space than this, in megabytes."""
    nice: Niceness = 15
    """Niceness of the learner's processes: 0 as others, 19 lowest priority."""
    device: str = ""
    """Device on which candidates are trained and measured, such as cuda:1; empty: target.device."""
    keep: PositiveInt = 2
    """Number of accepted drafters that stay on disk."""
    parent: Count = 0
    """End when this process has ended; 0: none. `headstart serve` sets it for its learner."""
    cycles: Count = 0
    """End after this many cycles; 0: never."""
    seed: Seed = 0
    """Seed of the choice of held-out prompts."""

    def __post_init__(self) -> None:
        if self.server and self.drafter:
            raise UserError(
                f"learn.server={self.server} says which drafter serves; learn.drafter is for an "
                "engine that loads exports. Leave one of them out."
            )
        if self.most_tokens < self.least_tokens:
            raise UserError(
                f"learn.most_tokens is {self.most_tokens}, less than learn.least_tokens "
                f"({self.least_tokens}), with which a cycle begins. Raise it."
            )
