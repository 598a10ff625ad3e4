"""Feature servers over HTTP: each is asked in turn, and another one after a failure.

A server that failed rests for a while, which grows with its consecutive failures. Meanwhile,
another server that does not rest is asked instead. A busy server rests as long as it asks for, and
is waited for without counting a failed attempt.
"""

from __future__ import annotations

import http.client
import itertools
import logging
import math
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

from heads.api.errors import UserError
from heads.api.reading import parse_json
from inference.engines.client import asked_wait
from inference.server.front.tls import client_context
from train.features.config import FeaturesConfig

logger = logging.getLogger(__name__)

FIRST_PAUSE, LONGEST_PAUSE = 0.25, 10.0
LATER = (http.client.REQUEST_TIMEOUT,)
"""Refusals after which another attempt may succeed."""
BUSY_SECONDS = 600.0
"""How long a request is repeated while servers say that they are busy, which counts as no failed
attempt."""
PIECE = 1 << 20
"""Most bytes of an answer that are read at once."""
Found = TypeVar("Found")


class FailureError(Exception):
    """A failed request that may succeed another time, with the reason."""


class BusyError(FailureError):
    """A server that is busy. wait: the seconds after which it wants to be asked again, if it says
    so."""

    def __init__(self, reason: str, wait: float | None) -> None:
        super().__init__(reason)
        self.wait = wait


class Address(NamedTuple):
    """Where a server listens. secured: https."""

    secured: bool
    host: str
    port: int

    @classmethod
    def of(cls, text: str) -> Address:
        """The address in `http://host:port` or `https://host:port`; raises `UserError` for anything
        else."""
        try:
            parts = urlsplit(text)
            host, port = parts.hostname, parts.port
        except ValueError:
            host, port = None, None
        known = parts.scheme in ("http", "https") and parts.path in ("", "/") if host else False
        if not host or not port or not known:
            raise UserError(
                f"features.servers: '{text}' is not an address like http://10.0.0.5:8765 or "
                "https://10.0.0.5:8765."
            )
        return cls(parts.scheme == "https", host, port)

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http{'s' if self.secured else ''}://{host}:{self.port}"


class Servers:
    """The servers of `config`, safe to use from several threads. what: the name for one in
    messages; headers: those of every request, besides the token."""

    def __init__(self, config: FeaturesConfig, what: str, headers: Mapping[str, str]) -> None:
        self.config, self.what = config, what
        self.all = [Address.of(text) for text in config.servers]
        secured = any(server.secured for server in self.all)
        self._tls = client_context("features.ssl_cafile", config.ssl_cafile) if secured else None
        self._headers = dict(headers)
        if token := config.token():
            self._headers["Authorization"] = f"Bearer {token}"
        self._turn, self._lock = itertools.cycle(self.all), threading.Lock()
        self._failures = dict.fromkeys(self.all, 0)
        self._rested = dict.fromkeys(self.all, 0.0)
        """Monotonic time at which a server's rest ends."""
        self._stopped = threading.Event()

    def greet(self, greet: Callable[[Address], object], advice: str) -> None:
        """Ask every server for its identity. Some may be down, but `greet` raises `UserError` for
        one that does not fit. advice: the last sentence of the error if none answers."""
        silent = []
        for server in self.all:
            try:
                greet(server)
            except FailureError as failure:
                silent.append(f"{server}: {failure}")
        if len(silent) == len(self.all):
            raise UserError(f"no {self.what} answers ({'; '.join(silent)}). {advice}")
        for line in silent:
            logger.warning("a %s does not answer and is left out for now: %s", self.what, line)

    def in_turn(self, ask: Callable[[Address], Found]) -> Found:
        """Call `ask` with one server after another until one answers; raises `UserError` if all
        attempts fail or all servers are busy for too long, `CancelledError` after `stop`."""
        failures: dict[str, str] = {}
        attempts, failed, begun = 0, 0, time.monotonic()
        while failed <= self.config.retries:
            server = self._next()
            attempts += 1
            try:
                found = ask(server)
            except FailureError as failure:
                failures[str(server)] = str(failure)
                message = "%s %s: %s (attempt %d)"
                logger.warning(message, self.what, server, failure, attempts)
                if isinstance(failure, BusyError):
                    self._rest(server, failure.wait)
                    pause = self._until_rested()
                    if time.monotonic() + pause - begun > BUSY_SECONDS:
                        break
                else:
                    self._rest(server)
                    pause = pause_after(failed)
                    failed += 1
            else:
                self._failures[server] = 0
                return found
            if failed <= self.config.retries and self._stopped.wait(pause):
                raise CancelledError
        reasons = "; ".join(f"{name}: {reason}" for name, reason in failures.items())
        raise UserError(
            f"no features after {attempts} attempts ({reasons}). Look at these "
            "servers, or raise features.timeout_seconds and features.retries; this command "
            "continues from its last saved state."
        )

    def _next(self) -> Address:
        """The next server in turn that does not rest; if all do, the one whose rest ends first.
        One that failed last is chosen once in a rest, so that if it hangs, others need not wait."""
        with self._lock:
            turn = [next(self._turn) for _ in self.all]
            now = time.monotonic()
            chosen = min(turn, key=lambda server: max(now, self._rested[server]))
            while next(self._turn) != chosen:
                pass
            if self._failures[chosen]:
                self._rested[chosen] = now + pause_after(self._failures[chosen])
            return chosen

    def _rest(self, server: Address, wait: float | None = None) -> None:
        """Let a server rest for `wait` seconds; None: longer after each failure."""
        with self._lock:
            pause = pause_after(self._failures[server]) if wait is None else wait
            self._rested[server] = time.monotonic() + pause
            self._failures[server] += 1

    def _until_rested(self) -> float:
        """Seconds until some server does not rest, at least the shortest pause."""
        with self._lock:
            return max(FIRST_PAUSE, min(self._rested.values()) - time.monotonic())

    @property
    def stopped(self) -> bool:
        return self._stopped.is_set()

    def stop(self) -> None:
        """Make threads that wait between two attempts give up."""
        self._stopped.set()

    def request(
        self,
        server: Address,
        method: str,
        path: str,
        body: bytes | None = None,
        *,
        most: int,
        headers: Mapping[str, str] | None = None,
        longest: float = math.inf,
    ) -> bytes:
        """An answer of at most `most` bytes, within `longest` seconds if features.timeout_seconds
        are more; raises `FailureError` if asking again may help, otherwise `UserError`."""
        seconds = min(longest, self.config.timeout_seconds)
        deadline = time.monotonic() + seconds
        if server.secured:
            connection: http.client.HTTPConnection = http.client.HTTPSConnection(
                server.host, server.port, timeout=seconds, context=self._tls
            )
        else:
            connection = http.client.HTTPConnection(server.host, server.port, timeout=seconds)
        try:
            connection.request(method, path, body, {**self._headers, **(headers or {})})
            opened = connection.sock  # which the connection forgets if it does not stay open
            answer = connection.getresponse()
            content = read_until(answer, opened, most + 1, deadline)
        except TimeoutError as error:
            raise FailureError(f"no answer within {seconds:g} s") from error
        except ssl.SSLCertVerificationError as error:
            raise UserError(
                f"the certificate of the {self.what} {server} is not valid here "
                f"({error.verify_message}). Name the file of the authority that signed it in "
                "features.ssl_cafile."
            ) from error
        except (OSError, http.client.HTTPException) as error:
            raise FailureError(f"{type(error).__name__}: {error}") from error
        finally:
            connection.close()
        if len(content) > most:
            raise FailureError(f"an answer of more than {most:,} bytes; is it a {self.what}?")
        if answer.status == http.client.OK:
            return content
        sentence = error_of(content) or f"it gave no reason; is it a {self.what}?"
        wait = asked_wait(answer.headers.get("Retry-After", ""))
        full = answer.status == http.client.SERVICE_UNAVAILABLE and wait is not None
        # Engines that have failed answer with 503 too, but do not ask for another attempt.
        if full or answer.status == http.client.TOO_MANY_REQUESTS:
            raise BusyError(f"status {answer.status}, {sentence}", wait)
        if answer.status >= http.client.INTERNAL_SERVER_ERROR or answer.status in LATER:
            raise FailureError(f"status {answer.status}, {sentence}")
        unknown = answer.status == http.client.UNAUTHORIZED
        hint = f" Set {self.config.token_variable}." if unknown else ""
        raise UserError(f"the {self.what} {server} refuses: {sentence}{hint}")


def read_until(
    answer: http.client.HTTPResponse, opened: socket.socket, most: int, deadline: float
) -> bytes:
    """The first `most` bytes of an answer's content. opened: its connection; deadline: monotonic
    time. Raises `TimeoutError` after it, also if the bytes come one by one."""
    content = bytearray()
    while len(content) < most:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        if not answer.isclosed():
            opened.settimeout(left)
        piece = answer.read1(min(PIECE, most - len(content)))
        if not piece:
            break
        content += piece
    return bytes(content)


def pause_after(failures: int, first: float | None = None, longest: float = LONGEST_PAUSE) -> float:
    """Seconds to wait, growing with the failures before from `first` (None: `FIRST_PAUSE`); a power
    above 1,023 is no float."""
    return float(min(longest, (FIRST_PAUSE if first is None else first) * 2 ** min(failures, 64)))


def error_of(content: bytes) -> str:
    """The message in a refusal, in OpenAI's format or plain; empty if there is none."""
    try:
        found: Any = parse_json(content, "the answer")["error"]
        return found if isinstance(found, str) else str(found["message"])
    except (UserError, LookupError, TypeError):
        return ""
