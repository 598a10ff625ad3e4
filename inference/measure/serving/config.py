"""How a running server is asked, and where its acceptance comes from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from heads.api.config import Count, NonEmpty, PositiveInt, Rows, Seconds, Timeout, config


@config("bench.serving")
@dataclass(frozen=True)
class ServingConfig:
    """Settings of a measurement of `bench.server`."""

    api: Literal["auto", "chat", "completions"] = "auto"
    """Endpoint. auto: chat for messages, completions for texts and token ids. completions: messages
    are rendered locally with the tokenizer of `target.path`, which must be the server's, and sent
    as token ids."""
    model: str = ""
    """The model's name at the server; empty: the only one it serves."""
    metrics: str = ""
    """Address of the server's metrics; empty: /metrics, then /prometheus/metrics on the server."""
    acceptance: Literal["auto", "responses", "counters", "chunks"] = "auto"
    """Source of the acceptance: responses (what each one reports), counters (differences of the
    server's counters), chunks (an estimate from the times of streamed pieces), or auto: the first
    of these that the server offers, without counters that need a key which is not given."""
    key_variable: str = "HEADSTART_SERVER_KEY"
    """Environment variable with the server's key, if it needs one. The key itself is never written
    or logged."""
    concurrency: NonEmpty[Rows] = (1,)
    """Numbers of concurrent requests; every prompt is measured at each of them."""
    window: PositiveInt = 2
    """Requests per concurrent client between two reads of the counters. All requests of a window
    are answered before the next one begins; intervals resample windows. One client: 1."""
    timeout: Timeout = 120.0
    """Seconds without data from the server after which a request counts as failed."""
    retries: Count = 15
    """How often a failed window is measured again before the measurement ends: with the default
    `backoff`, a server that restarts is waited for ten minutes. A server that has not answered yet
    and counts that do not match the answers are given up after 3."""
    backoff: Seconds = 1.0
    """Seconds before the first retry; doubled before each further one, up to 60. A server may ask
    for more, also up to 60."""
