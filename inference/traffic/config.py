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
    """The traffic, the server, the drafters, and the prompts that acceptance and costs are measured
    on."""

    file: str = ""
    """.jsonl of requests with their times (docs/tuning.md), or the text of a server's /metrics."""
    drafters: tuple[str, ...] = ()
    """Names of drafters of this run, or checkpoint folders; empty: all that the run has trained."""
    depths: NonEmpty[Depth] = (1, 2, 4, 8)
    """Draft lengths to compare; those that a drafter cannot draft are left out."""
    rows: Rows = 16
    """Rows that the server decodes together."""
    context: Size = 0
    """Positions that a row can hold; 0: as many as the longest request of the traffic needs."""
    answer_tokens: Tokens = 128
    """Length of an answer where the traffic does not say."""
    seconds: Seconds = 0.0
    """Text of /metrics: how long the server had run when it was taken; 0: the time that its engine
    was busy."""
    requests: Annotated[int, Ge(1), Le(1_000_000)] = 400
    """Text of /metrics: requests to simulate."""
    batches: NonEmpty[Rows] = (1, 4, 16)
    """Batch sizes at which costs are measured; between them they are interpolated."""
    temperature: Temperature = 0.0
    """Of the traffic's sampling."""
    prompts: str = ""
    """What acceptance is measured on, domain by domain: as bench.prompts. Empty: the validation
    prompts that were held out of the run's data."""
    prompts_per_domain: PositiveInt = 8
    """Prompts of each domain, at most."""
    max_new_tokens: TokensFromTwo = 64
    """Length of the answers that acceptance is measured on, at most."""
    repeats: Repeats = 9
    """Timed calls per point of the cost curves."""
    seed: Seed = 0
    """Of what is drawn: how much of each draft is kept, and the arrivals behind the text of
    /metrics."""
