"""The trainer's end of feature servers: requests in turn to each, tried again elsewhere."""

from __future__ import annotations

import http.client
import itertools
import logging
import ssl
import threading
from concurrent.futures import CancelledError
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from safetensors.torch import load, save

from heads.api.errors import UserError
from heads.api.features import FeatureSpec
from heads.api.reading import parse_json, refusing, require_object
from heads.api.target_info import TargetInfo
from heads.api.tensors import BROKEN
from inference.server.front.tls import client_context
from train.data.loader import PackedBatch
from train.features.config import FeaturesConfig
from train.features.remote import wire
from train.features.store.batches import Content
from train.features.store.layout import things_of

logger = logging.getLogger(__name__)

FIRST_PAUSE, LONGEST_PAUSE = 0.25, 10.0
LARGEST_IDENTITY = 1 << 20
"""Bytes of what a server says of itself."""
MOST_AROUND, VALUE_BYTES = 1 << 20, 16
"""Bytes that an answer may have beside its values (names, scales), and for each of them: more than
every format takes."""
ADVICE = "Is it a feature server?"
LATER = (http.client.REQUEST_TIMEOUT, http.client.TOO_MANY_REQUESTS)
"""Refusals that another attempt may not meet."""


class FailureError(Exception):
    """A request that may go well another time, with the reason."""


class RemoteClient:
    """Features from the servers of `config`, each asked first who it is; safe to use from several
    threads. Raises `UserError` when none answers, or one runs another target, tokenizer or
    precision."""

    def __init__(
        self, config: FeaturesConfig, info: TargetInfo, precision: str, needs: FeatureSpec
    ) -> None:
        self.config, self.info, self.precision = config, info, precision
        self.servers = [Address.of(text) for text in config.servers]
        secured = any(server.secured for server in self.servers)
        self.tls = client_context("features.ssl_cafile", config.ssl_cafile) if secured else None
        form = config.form(info)
        ask = wire.Ask.of(needs, form).to_json()
        self.headers = {wire.KEY_HEADER: wire.key_of(info, precision), wire.ASK_HEADER: ask}
        widest = max(info.hidden_size, form.top_logits)
        self.position_bytes = (len(needs.taps) + 1) * widest * VALUE_BYTES
        if token := config.token():
            self.headers["Authorization"] = f"Bearer {token}"
        self._turn, self._lock = itertools.cycle(self.servers), threading.Lock()
        self._stopped = threading.Event()
        self._greet()

    def _greet(self) -> None:
        """Ask every server who it is; some may be down, but none may be another."""
        silent = []
        for server in self.servers:
            try:
                said = self._request(server, "GET", "/identity", most=LARGEST_IDENTITY)
                self._require_same(server, identity_of(said))
            except FailureError as failure:
                silent.append(f"{server}: {failure}")
        if len(silent) == len(self.servers):
            raise UserError(
                f"no feature server answers ({'; '.join(silent)}). Start one with `headstart "
                "features features.serve=true`, and name it in features.servers."
            )
        for line in silent:
            logger.warning("a feature server does not answer and is left out for now: %s", line)

    def _require_same(self, server: Address, answer: dict[str, Any]) -> None:
        """Raise `UserError` when a server is not of this training's target."""
        theirs = answer["target"]
        pairs = [
            ("protocol", wire.FORMAT, answer.get("format")),
            ("target revision", self.info.revision, theirs.get("revision")),
            ("tokenizer", self.info.tokenizer_hash, theirs.get("tokenizer_hash")),
            ("precision", self.precision, answer.get("precision")),
        ]
        for name, mine, other in pairs:
            if mine != other:
                raise UserError(
                    f"the feature server {server} does not fit this training: its {name} "
                    f"is {other}, but {mine} is needed. Start it with the training's target and "
                    "engine.precision."
                )

    def fetch(self, packed: PackedBatch) -> Content:
        """Features of a batch from one server after another; raises `UserError` when all fail."""
        body = save({name: getattr(packed, name).int().contiguous() for name in wire.ROWS})
        most = MOST_AROUND + packed.tokens.numel() * self.position_bytes
        failures: dict[str, str] = {}
        for attempt in range(self.config.retries + 1):
            with self._lock:
                server = next(self._turn)
            try:
                return content_of(self._request(server, "POST", "/features", body, most=most))
            except FailureError as failure:
                name = str(server)
                failures[name] = str(failure)
                logger.warning("feature server %s: %s (attempt %d)", name, failure, attempt + 1)
            # A power of more than 1,023 is no float.
            pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** min(attempt, 16))
            if attempt < self.config.retries and self._stopped.wait(pause):
                raise CancelledError
        reasons = "; ".join(f"{name}: {reason}" for name, reason in failures.items())
        raise UserError(
            f"no features after {self.config.retries + 1} attempts ({reasons}). Look at these "
            "servers, or raise features.timeout_seconds and features.retries; this command "
            "continues from its last saved state."
        )

    def stop(self) -> None:
        self._stopped.set()

    def _request(
        self, server: Address, method: str, path: str, body: bytes | None = None, *, most: int
    ) -> bytes:
        """An answer of at most `most` bytes; raises `FailureError` when asking again may help,
        otherwise `UserError`."""
        seconds = self.config.timeout_seconds
        if server.secured:
            connection: http.client.HTTPConnection = http.client.HTTPSConnection(
                server.host, server.port, timeout=seconds, context=self.tls
            )
        else:
            connection = http.client.HTTPConnection(server.host, server.port, timeout=seconds)
        try:
            connection.request(method, path, body, self.headers)
            answer = connection.getresponse()
            content = answer.read(most + 1)
        except TimeoutError as error:
            raise FailureError(f"no answer within {seconds:g} s") from error
        except ssl.SSLCertVerificationError as error:
            raise UserError(
                f"the certificate of the feature server {server} is not valid here "
                f"({error.verify_message}). Name the file of the authority that signed it in "
                "features.ssl_cafile."
            ) from error
        except (OSError, http.client.HTTPException) as error:
            raise FailureError(f"{type(error).__name__}: {error}") from error
        finally:
            connection.close()
        if len(content) > most:
            raise FailureError(f"an answer of more than {most:,} bytes; is it a feature server?")
        if answer.status == http.client.OK:
            return content
        sentence = error_of(content)
        if answer.status >= http.client.INTERNAL_SERVER_ERROR or answer.status in LATER:
            raise FailureError(f"status {answer.status}, {sentence}")
        unknown = answer.status == http.client.UNAUTHORIZED
        hint = f" Set {self.config.token_variable}." if unknown else ""
        raise UserError(f"the feature server {server} refuses: {sentence}{hint}")


def error_of(content: bytes) -> str:
    """The sentence in a refusal."""
    try:
        return str(parse_json(content, "the answer")["error"]["message"])
    except (UserError, LookupError, TypeError):
        return "it gave no reason; is it a feature server?"


def identity_of(content: bytes) -> dict[str, Any]:
    """The facts that a server gives of itself; raises `FailureError` for an answer of another
    sort."""
    try:
        facts = require_object(parse_json(content, "the answer", ADVICE), "the answer", ADVICE)
        return {**facts, "target": require_object(facts.get("target"), "'target'", ADVICE)}
    except UserError as error:
        raise FailureError(str(error)) from error


def content_of(answer: bytes) -> Content:
    """The features in an answer; raises `FailureError` for one that was cut or holds others."""
    try:
        with refusing("the answer", ADVICE, *BROKEN):
            return things_of(load(answer))
    except UserError as error:
        raise FailureError(str(error)) from error


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
