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
    as export.engine says. The traffic is what `headstart serve` with serve.engine samples."""
    folder: str = ""
    """Folder of the journal, the sampled traffic and the candidates; empty: the one into which the
    server samples answers."""
    key_variable: str = "HEADSTART_SERVE_TOKEN"
    """Environment variable with the server's token, if it wants one."""
    timeout: Timeout = 120.0
    """Seconds after which a request to the server has failed; it loads candidates meanwhile."""
    verify: bool = True
    """Check the certificate of a server that speaks https."""
    least_tokens: Annotated[int, Ge(1), Le(1_000_000_000)] = 20_000
    """A cycle begins once so many tokens of answers have been sampled."""
    most_tokens: Annotated[int, Ge(1), Le(1_000_000_000)] = 200_000
    """Most tokens of answers that a cycle learns from; the newest ones are taken."""
    all_tokens: TokenTotal = 0
    """Tokens of answers that all cycles together may learn from; 0: no limit."""
    client_share: Fraction = 0.25
    """Largest share of a cycle's tokens, and of a comparison's answers, that comes from one client,
    or the n-th part where there are n clients and that is more. Clients are told apart as the
    server's fairness does. 1: no limit, for a server with one user."""
    held_out: Annotated[float, Gt(0), Le(0.5)] = 0.2
    """Share of the prompts that is held out of the training: one half chooses the checkpoint, the
    other one measures the candidate."""
    held_out_prompts: PositiveInt = 64
    """Most prompts in each half."""
    least_gain: Annotated[float, Ge(0), Lt(10)] = 0.0
    """What a candidate's tau on held-out traffic must exceed the served drafter's by to be
    compared within the server."""
    trial_share: OpenFraction = 0.5
    """Share of the server's rows that draft with the candidate while both are compared."""
    error_rate: OpenFraction = 0.01
    """Chance of ever taking a candidate that is not better, per candidate and for any number of
    looks."""
    most_pairs: PositiveInt = 2000
    """Answers of each drafter after which a comparison that has shown nothing ends; the candidate
    is rejected."""
    look_seconds: Timeout = 5.0
    """Seconds between two looks at the traffic or at a comparison."""
    pause_seconds: Timeout = 60.0
    """Seconds until the learner tries again after a full disk or a server that does not answer."""
    free_megabytes: NonNegativeFloat = 512.0
    """The learner pauses while its disk has less free than this."""
    nice: Niceness = 15
    """Priority of the learner's processes: 0 as others, 19 lowest."""
    device: str = ""
    """Where candidates are trained and measured, such as cuda:1; empty: target.device."""
    keep: PositiveInt = 2
    """Drafters that were taken and stay on disk."""
    with_parent: bool = False
    """End when the process that started the learner has ended, as `headstart serve` does it."""
    cycles: Count = 0
    """End after so many cycles; 0: never."""
    seed: Seed = 0
    """Of which prompts are held out."""

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
