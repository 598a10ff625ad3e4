"""The configuration of a server: its address, limits and timeouts, and what it records."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from annotated_types import Ge, Le

from heads.api.config import Count, Fraction, Port, Seconds, Size, config
from heads.api.errors import UserError
from heads.api.reading import read_text
from inference.server.front.limits import Limits
from inference.server.front.secret import Secret, is_loopback

Limit = Annotated[float, Ge(0.1), Le(1e9)]
"""A limit in seconds."""
Connections = Annotated[int, Ge(1), Le(1_000_000)]

TOKEN_VARIABLE = "HEADSTART_SERVE_TOKEN"
"""Environment variable that holds the bearer token."""
ADMIN_VARIABLE = "HEADSTART_SERVE_ADMIN_TOKEN"
"""Environment variable that holds the admin token, which allows changing the drafter."""
SHORTEST_TOKEN = 16
"""Fewest characters of a token."""
LARGEST_TOKEN = 16_384
"""Most bytes of a token's file: a longer token does not fit into a request's headers."""


@config("serve")
@dataclass(frozen=True)
class ServeConfig:
    """Settings of `headstart serve`. Rows decoded together: `decode.batch_size`; defaults of
    sampling and length: `decode`."""

    drafter: str = ""
    """Name of a drafter of this run, checkpoint folder, kind without weights, or none; empty: the
    drafter of the run that was measured to be the fastest."""
    host: str = "127.0.0.1"
    """Address to listen on. Any address but loopback needs a token, or serve.open=true."""
    port: Port = 8000
    """Port to listen on; 0 takes a free one and prints it."""
    name: str = ""
    """Model name that clients see; empty: the target's id, or the last part of its folder."""
    token_file: str = ""
    """File with the bearer token; empty: the environment variable HEADSTART_SERVE_TOKEN, and if
    that is not set, no token."""
    admin_token_file: str = ""
    """File with the token that allows changing the drafter over HTTP; empty: the environment
    variable HEADSTART_SERVE_ADMIN_TOKEN, and if that is not set, such changes are not allowed."""
    watch_folder: str = ""
    """Folder whose newest checkpoint is the drafter: a new one is verified and installed while
    requests run; one that cannot be installed is refused. Empty: no folder is watched."""
    open: bool = False
    """Allow listening on an address other than loopback without a token."""
    context: Size = 0
    """Maximum number of positions of a request (prompt and answer); every row has memory for this
    many. 0: the target's limit, at most 4096."""
    queue: Count = 128
    """Maximum number of requests that wait for a row; further ones get status 429."""
    queue_seconds: Limit = 60.0
    """Seconds that a request waits for a row before it gets status 429."""
    request_seconds: Limit = 600.0
    """Seconds from arrival to the end of an answer, after which it is ended with status 504."""
    write_seconds: Limit = 30.0
    """Seconds that a streaming client may take to read a piece before it counts as disconnected."""
    header_seconds: Limit = 10.0
    """Seconds that the headers of a request may take to arrive, and a TLS handshake."""
    body_seconds: Limit = 20.0
    """Seconds that the rest of a request may take to arrive after its headers."""
    body_kilobytes: Annotated[int, Ge(1), Le(1_048_576)] = 1024
    """Largest request in kilobytes; larger ones get status 413. Nothing is read before the token is
    verified."""
    idle_seconds: Limit = 30.0
    """Seconds that a connection may stay open without a request."""
    connections: Connections = 1024
    """Maximum number of connections. At the limit, a new connection replaces the one that has
    waited longest for its client."""
    connections_per_address: Connections = 512
    """Maximum number of connections of one address (IPv6: of a /64 network), with the same rule."""
    ssl_certfile: str = ""
    """PEM file of a certificate with its chain; the server then speaks https. Empty: http."""
    ssl_keyfile: str = ""
    """PEM file of the certificate's private key, unencrypted; empty: serve.ssl_certfile contains
    it."""
    grace_seconds: Seconds = 30.0
    """Seconds that running requests may continue after SIGTERM or SIGINT. New ones get status 503
    meanwhile."""
    domains: tuple[str, ...] = ("chat", "code", "math", "summary", "translation", "qa", "other")
    """Domains that requests may name in the header X-Headstart-Domain, for metrics and records;
    unknown ones count as other."""
    log_rejections: bool = False
    """Write a record of every verification, for the next round of training (docs/formats.md,
    Records)."""
    records: str = ""
    """Folder of the records; empty: <root>/records."""
    records_megabytes: Annotated[float, Ge(0.01), Le(1e9)] = 256.0
    """Size in megabytes at which recording stops; the metrics count the records dropped after
    that."""
    records_redact: bool = False
    """Leave tokens and text out of the records: only positions, depths, probabilities and keyed
    hashes are kept."""

    engine: str = ""
    """Address of an engine that answers, such as http://127.0.0.1:8001 of vLLM: requests are passed
    on to it, and its answers are sampled for a learner (docs/learning.md). Empty: this server
    decodes."""

    learn: bool = False
    """Learn from the traffic in the background: sample answers, and run `headstart learn` beside
    the server (docs/learning.md)."""
    sample: bool = False
    """Sample answers for a `headstart learn` that is started by hand. Needs an admin token, with
    which the learner changes the drafter."""
    learn_folder: str = ""
    """Folder of the samples, the learner's journal and its candidates; empty: <root>/learn."""
    learn_share: Fraction = 1.0
    """Share of the answers that is sampled. Requests with "store": false or the header
    X-Headstart-Store: false are never sampled."""
    learn_megabytes: Annotated[float, Ge(0.01), Le(1e9)] = 256.0
    """Largest size in megabytes of the samples that wait for the learner; beyond it, new samples
    replace the oldest."""
    learn_seconds: Annotated[float, Ge(0.1), Le(60)] = 60.0
    """Seconds after which a sampled answer is written at the latest (up to 60); the learner sees it
    then."""
    learn_settings: tuple[str, ...] = ()
    """Further settings of the learner, such as [learn.least_tokens=50000,train.max_steps=200]."""

    def __post_init__(self) -> None:
        if not 1 <= len(self.domains) <= 64:
            raise UserError(
                "serve.domains must name 1 to 64 domains, each a label of the metrics; given: "
                f"{len(self.domains)}."
            )
        if self.engine and (self.log_rejections or self.watch_folder):
            raise UserError(
                "serve.engine passes requests on: the engine drafts, and this server has neither "
                "verifications to record (serve.log_rejections) nor a drafter to change "
                "(serve.watch_folder). Leave them out."
            )
        if (self.learn or self.sample) and self.watch_folder:
            raise UserError(
                "serve.watch_folder makes the newest checkpoint of a folder the drafter, at every "
                "start again, but with serve.learn and serve.sample a learner changes the drafter. "
                "Leave one of them out."
            )
        if (self.learn or self.sample) and self.records_redact:
            raise UserError(
                "serve.records_redact keeps every token out of records, but serve.learn and "
                "serve.sample sample answers with their tokens. Leave one of them out."
            )
        if self.learn and self.sample:
            raise UserError(
                "serve.learn=true samples for the learner that the server starts, "
                "serve.sample=true for another one; a server has one. Leave one of them out."
            )

    def limits(self, rows: int) -> Limits:
        """The limits of the front. rows: decoded together."""
        body = self.body_kilobytes * 1024
        return Limits(
            connections=self.connections,
            connections_per_address=self.connections_per_address,
            header_seconds=self.header_seconds,
            idle_seconds=self.idle_seconds,
            body_seconds=self.body_seconds,
            write_seconds=self.write_seconds,
            body_bytes=body,
            bodies_bytes=(rows + self.queue) * body,
        )

    def domain(self, given: str | None) -> str:
        """The label of a request's domain: one of `domains`, "other" for unknown ones, "none" if
        the request names none."""
        if not given:
            return "none"
        return given if given in self.domains else "other"


def read_secret(config: ServeConfig) -> Secret | None:
    """The token from `serve.token_file` or the environment, or None.

    Raises `UserError` for a file that cannot be read, a short token, and a missing token if other
    machines can reach the address.
    """
    found = _read_token("token_file", config.token_file, TOKEN_VARIABLE, "bearer token")
    if found is None and not config.open and not is_loopback(config.host):
        raise UserError(
            f"serve.host={config.host} can be reached from other machines. Set {TOKEN_VARIABLE} "
            "or serve.token_file, or say serve.open=true to serve everybody who can reach it."
        )
    return found


def read_admin_secret(config: ServeConfig) -> Secret | None:
    """The admin token, or None. Raises `UserError` for a file that cannot be read, and for a short
    token."""
    given = config.admin_token_file, ADMIN_VARIABLE
    return _read_token("admin_token_file", *given, "admin token")


def _read_token(setting: str, file: str, variable: str, what: str) -> Secret | None:
    """A token from a file or, if none is given, from the environment."""
    value = os.environ.get(variable, "").strip()
    if file:
        try:
            value = read_text(Path(file), "Give a text file.", LARGEST_TOKEN).strip()
        except UserError as error:
            raise UserError(f"serve.{setting} {error}") from error
        if not value:
            raise UserError(f"serve.{setting} '{file}' is empty.")
    if value and len(value) < SHORTEST_TOKEN:
        raise UserError(
            f"the {what} has {len(value)} characters; {SHORTEST_TOKEN} are the least. "
            "`openssl rand -hex 24` makes one."
        )
    return Secret(value.encode()) if value else None
