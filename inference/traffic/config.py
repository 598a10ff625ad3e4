"""Which traffic is simulated, on what server, with which drafters."""

from __future__ import annotations

from dataclasses import dataclass

from heads.api.errors import UserError


@dataclass(frozen=True)
class TrafficConfig:
    """The traffic, the server, the drafters, and the prompts that acceptance and costs are measured on."""

    file: str = ""
    """.jsonl of requests with their times (docs/tuning.md), or the text of a server's /metrics."""
    drafters: tuple[str, ...] = ()
    """Names of drafters of this run, or checkpoint folders; empty: all that the run has trained."""
    depths: tuple[int, ...] = (1, 2, 4, 8)
    """Draft lengths to compare; those that a drafter cannot draft are left out."""
    rows: int = 16
    """Rows that the server decodes together."""
    context: int = 0
    """Positions that a row can hold; 0: as many as the longest request of the traffic needs."""
    answer_tokens: int = 128
    """Length of an answer where the traffic does not say."""
    seconds: float = 0.0
    """Text of /metrics: how long the server had run when it was taken; 0: the time that its engine was busy."""
    requests: int = 400
    """Text of /metrics: requests to simulate."""
    batches: tuple[int, ...] = (1, 4, 16)
    """Batch sizes at which costs are measured; between them they are interpolated."""
    temperature: float = 0.0
    """Of the traffic's sampling."""
    prompts: str = "assets/prompts/training/validation.jsonl"
    """What acceptance is measured on, domain by domain: as bench.prompts."""
    prompts_per_domain: int = 8
    """Prompts of each domain, at most."""
    max_new_tokens: int = 64
    """Length of the answers that acceptance is measured on, at most."""
    repeats: int = 9
    """Timed calls per point of the cost curves."""
    seed: int = 0
    """Of what is drawn: how much of each draft is kept, and the arrivals behind the text of /metrics."""

    def __post_init__(self) -> None:
        for name in ("rows", "answer_tokens", "requests", "prompts_per_domain", "repeats"):
            if getattr(self, name) < 1:
                raise UserError(f"traffic.{name} must be at least 1; given: {getattr(self, name)}.")
        for name in ("depths", "batches"):
            values = getattr(self, name)
            if not values or min(values) < 1:
                raise UserError(f"traffic.{name} must list whole numbers of at least 1; given: {list(values)}.")
        for name in ("context", "seconds", "temperature"):
            if getattr(self, name) < 0:
                raise UserError(f"traffic.{name} must not be negative; given: {getattr(self, name)}.")
        if self.max_new_tokens < 2:
            raise UserError(f"traffic.max_new_tokens must be at least 2; given: {self.max_new_tokens}.")
