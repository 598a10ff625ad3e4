"""A feature server: the frozen target behind HTTP (`headstart features features.serve=true`).

It listens on this machine alone unless configured otherwise, and then insists on a token. Requests
queue for the one target; one that cannot be served is answered with a sentence.
"""

from __future__ import annotations

import hmac
import json
import logging
import os
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
from safetensors.torch import save

from heads.api.errors import UserError
from train.features.base import LOOPBACK, FeatureTarget
from train.features.config import FeaturesConfig
from train.features.remote import wire
from train.features.store.layout import precision_of, tensors_of
from train.processes import terminable

logger = logging.getLogger(__name__)

IDLE_SECONDS = 60.0
"""A connection that says nothing for so long is closed."""


class FeatureServer(ThreadingHTTPServer):
    """Serves `target` on host:port (0: any free port); dtype: of the features. token: what requests
    must carry as `Authorization: Bearer <token>`, if any. Raises `UserError` for an address that
    cannot be listened on, or that others reach without a token."""

    daemon_threads = True

    def __init__(
        self, target: FeatureTarget, dtype: torch.dtype, host: str, port: int, token: str = ""
    ) -> None:
        if host not in LOOPBACK and not token:
            raise UserError(
                f"features.host '{host}' can be reached by other machines, but no token is set: "
                "anybody could use this target. Put a secret into the environment variable named "
                "by features.token_variable, here and where the trainings run."
            )
        self.target, self.dtype, self.token = target, dtype, token
        self.precision = precision_of(dtype, target.dtype)
        self.key = wire.key_of(target.info, self.precision)
        self.served = 0
        self._one_at_a_time = threading.Lock()
        try:
            super().__init__((host, port), Handler)
        except OSError as error:
            raise UserError(
                f"cannot listen on {host}:{port} ({error.strerror or error}). Set features.host "
                "and features.port; port 0 takes any."
            ) from error

    @property
    def address(self) -> str:
        """As features.servers wants it."""
        host, port = self.server_address[:2]
        return f"http://{host!s}:{port}"

    def compute(self, body: bytes, ask: wire.Ask) -> bytes:
        """The answer to a request; raises `UserError` for rows that the target cannot read."""
        packed = wire.unpack_rows(body, self.target.info)
        with self._one_at_a_time:
            content, _ = wire.compute(self.target, self.dtype, ask, packed)
            self.served += 1
        return bytes(save(tensors_of(content)))


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    server: FeatureServer
    protocol_version = "HTTP/1.1"
    timeout = IDLE_SECONDS

    def do_GET(self) -> None:
        server = self.server
        if not self._authorise() or not self._is_at("/identity"):
            return
        facts = {"target": server.target.info.to_dict(), "precision": server.precision}
        content = {"format": wire.FORMAT, **facts, "key": server.key}
        self._answer(200, json.dumps(content).encode(), "application/json")

    def do_POST(self) -> None:
        """Answer a request for the features of rows."""
        length = self.headers.get("Content-Length", "")
        if not length.isdigit() or int(length) > wire.LARGEST_REQUEST:
            self.close_connection = True
            limit = wire.LARGEST_REQUEST
            self._refuse(413, f"a request has at most {limit} bytes and says how many.")
            return
        body = self.rfile.read(int(length))
        if not self._authorise() or not self._is_at("/features"):
            return
        if self.headers.get(wire.KEY_HEADER) != self.server.key:
            info = self.server.target.info
            self._refuse(
                409,
                f"this server runs '{info.id}', revision {info.revision}, in "
                f"{self.server.precision}: not what was asked for.",
            )
        else:
            self._features(body)

    def _is_at(self, path: str) -> bool:
        """Whether the request is for `path`; refuses it otherwise."""
        if self.path != path:
            self._refuse(404, f"there is no '{self.path}' here: GET /identity or POST /features.")
        return self.path == path

    def _features(self, body: bytes) -> None:
        try:
            header = self.headers.get(wire.ASK_HEADER, "")
            answer = self.server.compute(body, wire.Ask.from_json(header, self.server.target.info))
        except UserError as error:
            self._refuse(400, str(error))
        # out of memory, a lost device: the next request may go well
        except (RuntimeError, MemoryError) as error:
            logger.warning("a request failed: %s", error)
            reason = next(iter(str(error).splitlines()), "no message")
            self._refuse(500, f"{type(error).__name__}: {reason}")
        else:
            self._answer(200, answer, "application/octet-stream")

    def _authorise(self) -> bool:
        given, wanted = self.headers.get("Authorization", ""), f"Bearer {self.server.token}"
        allowed = not self.server.token or hmac.compare_digest(given.encode(), wanted.encode())
        if not allowed:
            self._refuse(401, "the token is missing or wrong.")
        return allowed

    def _refuse(self, status: int, sentence: str) -> None:
        self._answer(status, json.dumps({"error": sentence}).encode(), "application/json")

    def _answer(self, status: int, content: bytes, kind: str) -> None:
        try:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)
        except OSError as error:  # the client has gone
            logger.info("the answer could not be delivered: %s", error)
            self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - named by http.server
        logger.debug(format, *args)


def serve(
    target: FeatureTarget, config: FeaturesConfig, dtype: torch.dtype, say: Callable[[str], None]
) -> None:
    """Serve features until SIGTERM or Ctrl-C. After a signal the process ends here, with status 0:
    threads of connections may be inside of torch, and an interpreter that ends around them was seen
    to abort. There is nothing left to write."""
    token = os.environ.get(config.token_variable, "")
    server = FeatureServer(target, dtype, config.host, config.port, token)
    say(f"features of {target.info.id} in {server.precision} at {server.address}; Ctrl-C ends it")
    try:
        with terminable(), server:
            server.serve_forever()
    except (KeyboardInterrupt, SystemExit) as ending:
        say(f"stopped after {server.served} requests")
        if isinstance(ending, SystemExit):
            os._exit(0)
