"""The configuration of a simulation: the traffic, the server and the drafters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Le

from heads.api.config import (
    Depth,
    NonEmpty,
    PositiveInt,
    Repeats,
    Rows,
    Seconds,
    Seed,
    Size,
    Temperature,
    Tokens,
    TokensFromTwo,
    config,
)


@config("traffic")
@dataclass(frozen=True)
class TrafficConfig:
    """The traffic, the server, the drafters, and the prompts for measuring acceptance and costs."""

    file: str = ""
    """.jsonl file of requests with their times (docs/tuning.md), or the text of a server's
    /metrics."""
    drafters: tuple[str, ...] = ()
    """Names of drafters of this run, or checkpoint folders; empty: all that the run has trained."""
    depths: NonEmpty[Depth] = (1, 2, 4, 8)
    """Draft lengths to compare; those that a drafter cannot draft are left out."""
    rows: Rows = 16
    """Rows that the server decodes together."""
    context: Size = 0
    """Positions that a row can hold; 0: as many as the longest request of the traffic needs."""
    answer_tokens: Tokens = 128
    """Length of an answer in tokens if the traffic does not give it."""
    seconds: Seconds = 0.0
    """Text of /metrics: seconds that the server had run when it was saved; 0: the time that its
    engine was busy."""
    requests: Annotated[int, Ge(1), Le(1_000_000)] = 400
    """Text of /metrics: number of requests to simulate."""
    batches: NonEmpty[Rows] = (1, 4, 16)
    """Batch sizes at which costs are measured; costs between them are interpolated."""
    temperature: Temperature = 0.0
    """Temperature of the traffic."""
    prompts: str = ""
    """Prompts for measuring the acceptance of each domain, as bench.prompts. Empty: the validation
    prompts that were held out of the run's data."""
    prompts_per_domain: PositiveInt = 8
    """Maximum number of prompts of each domain."""
    max_new_tokens: TokensFromTwo = 64
    """Maximum length in tokens of the answers on which acceptance is measured."""
    repeats: Repeats = 9
    """Timed calls per point of the cost curves."""
    seed: Seed = 0
    """Seed of the random draws: how much of each draft is accepted, and the arrivals if the traffic
    is the text of /metrics."""
