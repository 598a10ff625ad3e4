"""A feature server: the frozen target behind HTTP, for trainings that run elsewhere (`headstart
features features.serve=true`).

It listens on this machine alone unless told otherwise, and then insists on a token. Requests queue
for the one target; a request that cannot be served is answered with a sentence, and the server goes
on.
"""

from __future__ import annotations

import hmac
import json
import logging
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
from safetensors.torch import save

from heads.api.errors import UserError
from train.features.base import LOOPBACK, DescribedTarget, OnlineFeatures
from train.features.remote.wire import (
    ASK_HEADER,
    KEY_HEADER,
    LARGEST_REQUEST,
    Ask,
    identity,
    key_of,
    unpack_rows,
)
from train.features.store.batches import Form, encode_batch
from train.features.store.layout import precision_of, tensors_of
from train.features.store.writer import to_cpu

logger = logging.getLogger(__name__)

IDLE_SECONDS = 60.0
"""A connection that says nothing for so long is closed."""


class FeatureServer(ThreadingHTTPServer):
    """Serves `target` on host:port (0: any free port, see `server_address`). dtype: of the
    features, as in engine.precision.

    token: what requests must carry as `Authorization: Bearer <token>`; empty: nothing. Raises
    `UserError` for an address that cannot be listened on, and for one that others reach without a
    token.
    """

    daemon_threads = True

    def __init__(
        self, target: DescribedTarget, dtype: torch.dtype, host: str, port: int, token: str = ""
    ) -> None:
        if host not in LOOPBACK and not token:
            raise UserError(
                f"features.host '{host}' can be reached by other machines, but no token is set: "
                "anybody could use this target. Put a secret into the environment variable named "
                "by features.token_variable, here and where the trainings run."
            )
        self.target, self.dtype, self.token = target, dtype, token
        self.precision = precision_of(dtype, target.dtype)
        self.key = key_of(target.info, self.precision)
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

    def compute(self, body: bytes, ask: Ask) -> bytes:
        """The answer to a request; raises `UserError` for rows that the target cannot read."""
        packed = unpack_rows(body, self.target.info)
        form = Form(
            ask.format, self.target.info.hidden_size, self.target.info.vocab_size, ask.top_logits
        )
        online = OnlineFeatures(self.target, ask.needs, self.dtype)
        with self._one_at_a_time:
            content = to_cpu(encode_batch(online.batch(packed), ask.taps, form, online.logits))
            self.served += 1
        return bytes(save(tensors_of(content)))


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    server: FeatureServer
    protocol_version = "HTTP/1.1"
    timeout = IDLE_SECONDS

    def do_GET(self) -> None:
        if not self._authorise():
            return
        if self.path != "/identity":
            self._refuse(404, f"there is no '{self.path}' here: GET /identity or POST /features.")
            return
        content = identity(self.server.target.info, self.server.precision)
        self._answer(200, json.dumps(content).encode(), "application/json")

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "")
        if not length.isdigit() or int(length) > LARGEST_REQUEST:
            self.close_connection = True
            self._refuse(413, f"a request has at most {LARGEST_REQUEST} bytes and says how many.")
            return
        body = self.rfile.read(int(length))
        if not self._authorise():
            return
        if self.path != "/features":
            self._refuse(404, f"there is no '{self.path}' here: GET /identity or POST /features.")
        elif self.headers.get(KEY_HEADER) != self.server.key:
            info = self.server.target.info
            self._refuse(
                409,
                f"this server runs '{info.id}', revision {info.revision}, in "
                f"{self.server.precision}: not what was asked for.",
            )
        else:
            self._features(body)

    def _features(self, body: bytes) -> None:
        try:
            ask = Ask.from_json(self.headers.get(ASK_HEADER, ""), self.server.target.info)
            answer = self.server.compute(body, ask)
        except UserError as error:
            self._refuse(400, str(error))
        # out of memory, a lost device: the next request may go well
        except (RuntimeError, MemoryError) as error:
            logger.warning("a request failed: %s", error)
            self._refuse(
                500,
                f"{type(error).__name__}: "
                f"{str(error).splitlines()[0] if str(error) else 'no message'}",
            )
        else:
            self._answer(200, answer, "application/octet-stream")

    def _authorise(self) -> bool:
        given = self.headers.get("Authorization", "").encode()
        if self.server.token and not hmac.compare_digest(
            given, f"Bearer {self.server.token}".encode()
        ):
            self._refuse(401, "the token is missing or wrong.")
            return False
        return True

    def _refuse(self, status: int, sentence: str) -> None:
        self._answer(status, json.dumps({"error": sentence}).encode(), "application/json")

    def _answer(self, status: int, content: bytes, kind: str) -> None:
        try:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)
        except OSError as error:  # whoever asked has gone
            logger.info("the answer could not be delivered: %s", error)
            self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - named by http.server
        logger.debug(format, *args)
