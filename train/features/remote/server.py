"""A feature server: the frozen target behind HTTP (`headstart features features.serve=true`).

It listens on this machine alone unless configured otherwise; it then requires a token.
`inference.server.front` limits the cost of each client, as in `headstart serve`. Requests of
several clients take turns at the one target. A request that cannot be served gets an error message.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from safetensors.torch import save

from heads.api.errors import UserError
from heads.api.features import FeatureSpec
from inference.server.errors import ApiError
from inference.server.front.fair import Place, Places
from inference.server.front.limits import Limits
from inference.server.front.quiet import QuietLog
from inference.server.front.secret import Secret, client_of, is_loopback
from inference.server.front.server import HttpServer, bind, url_of
from inference.server.front.signals import ended_by_signals
from inference.server.front.site import Message, Receive, Send, Site
from inference.server.front.tls import server_context
from inference.server.front.workers import FairWorkers, work_in_turn
from train.features.base import FeatureTarget
from train.features.config import FeaturesConfig
from train.features.remote import wire
from train.features.remote.shared import SharedPasses
from train.features.store.batches import to_cpu
from train.features.store.layout import precision_of, tensors_of

logger = logging.getLogger(__name__)

MOST_WAITING = 64
"""Requests that run or wait; further ones are answered with status 503, which clients repeat."""
THREADS = 3
"""One thread runs the target; the others read the next requests and write the last answers."""
CLOSE_SECONDS = 1.0
GIB = 1 << 30


class FeatureServer:
    """Serves `target` on host:port (0: any free port); dtype: of the features. token: must be sent
    with requests as `Authorization: Bearer <token>`, if set; certfile, keyfile: for https; shared:
    the features that several trainings read; by default only those that each asks for, and nothing
    is kept. Raises `UserError` for an address on which it cannot listen, or that other machines
    reach without a token, and for certificates that cannot be used."""

    def __init__(
        self,
        target: FeatureTarget,
        dtype: torch.dtype,
        host: str,
        port: int,
        token: str = "",
        certfile: str = "",
        keyfile: str = "",
        shared: SharedPasses | None = None,
        loading: str = "",
    ) -> None:
        if not is_loopback(host) and not token:
            raise UserError(
                f"features.host '{host}' can be reached by other machines, but no token is set: "
                "anybody could use this target. Put a secret into the environment variable named "
                "by features.token_variable, here and where the trainings run."
            )
        self.target, self.dtype = target, dtype
        self.precision, self.loading = precision_of(dtype, target.dtype), loading
        self.key = wire.key_of(target.info, self.precision, loading)
        self.shared = SharedPasses(FeatureSpec(), 0) if shared is None else shared
        self.site = Site(
            self._answer,
            Limits(body_bytes=wire.LARGEST_REQUEST, bodies_bytes=wire.MOST_HELD, body_seconds=60.0),
            Secret(token.encode()) if token else None,
            tls=server_context("features", certfile, keyfile),
            refused=self._refused,
        )
        self._places = Places(MOST_WAITING)
        self._log = QuietLog(logger)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended = asyncio.Event()
        self.listening = bind("features", host, port)
        # connections wait from here on, also if `run` comes later
        self.listening.listen()
        self.address = url_of(self.listening, self.site.tls is not None)
        """The address, as features.servers takes it."""

    def run(self) -> None:
        """Serve until `end`."""
        asyncio.run(self._run())

    async def _run(self) -> None:
        self._workers = FairWorkers(THREADS, "headstart-features")
        self._loop = asyncio.get_running_loop()
        front = HttpServer(self.site, self.listening)
        front.start()
        try:
            await self._ended.wait()
            await front.close(CLOSE_SECONDS)
        finally:
            self._workers.stop()
            self.listening.close()

    def end(self) -> None:
        """Make `run` return. Call it from any thread."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._ended.set)
        else:
            self._ended.set()

    def compute(self, body: bytes, ask: wire.Ask) -> bytes:
        """The answer to a request; raises `UserError` for rows that the target cannot read."""
        packed = wire.unpack_rows(body, self.target.info)
        content = self.shared.answer(
            body, ask, lambda whole: to_cpu(wire.compute(self.target, self.dtype, whole, packed)[0])
        )
        return bytes(save(tensors_of(content)))

    async def _answer(self, scope: Message, receive: Receive, send: Send) -> None:
        """ASGI: GET /identity and POST /features; raises `ApiError`."""
        way = scope["method"], scope["path"]
        if way == ("GET", "/identity"):
            target, loaded = self.target.info.to_dict(), {"loading": self.loading}
            facts = {"target": target, "precision": self.precision, **loaded, "key": self.key}
            content = json.dumps({"format": wire.FORMAT, **facts}).encode()
            await send_whole(send, content, b"application/json")
        elif way == ("POST", "/features"):
            headers = {name.decode(): value.decode("latin-1") for name, value in scope["headers"]}
            body = (await receive())["body"]
            with self._place_of(client_of(scope["client"][0])) as place:
                content = await self._in_turn(place, headers, body)
                # the answer is held, and its place taken, until it has been read
                await send_whole(send, content, b"application/octet-stream")
        else:
            raise ApiError(
                404, f"there is no {way[0]} {way[1]} here: GET /identity or POST /features."
            )

    @contextmanager
    def _place_of(self, client: str) -> Iterator[Place]:
        """A place among the requests that are held, for a block; raises `ApiError` if none is
        free."""
        place = self._places.take(client)
        if place is None:
            raise busy(f"{len(self._places)} requests run or wait")
        try:
            yield place
        finally:
            place.leave()

    async def _in_turn(self, place: Place, headers: Mapping[str, str], body: bytes) -> bytes:
        """The features for a request, once it is its client's turn; raises `ApiError`."""
        why = "other clients wait, and this address has the most requests"
        work = partial(self._features, headers, body)
        return await work_in_turn(self._workers, place, work, partial(busy, why))

    def _features(self, headers: Mapping[str, str], body: bytes) -> bytes:
        """The features for a request; raises `ApiError`. Runs on a worker thread."""
        if headers.get(wire.KEY_HEADER.lower()) != self.key:
            info = self.target.info
            raise ApiError(
                409,
                f"this server runs '{info.id}', revision {info.revision}, in {self.precision}: not "
                "what was asked for.",
            )
        try:
            ask = wire.Ask.from_json(headers.get(wire.ASK_HEADER.lower(), ""), self.target.info)
            return self.compute(body, ask)
        except UserError as error:
            raise ApiError(400, str(error)) from error
        # out of memory, a lost device: the next request may succeed
        except (RuntimeError, MemoryError) as error:
            logger.warning("a request failed: %s", error)
            reason = next(iter(str(error).splitlines()), "no message")
            raise ApiError(500, f"{type(error).__name__}: {reason}") from error

    def _refused(self, method: str, error: ApiError, client: str) -> None:
        self._log.note(f"refused with {error.status}", f"{error.kind}, client {client}")


async def send_whole(send: Send, content: bytes, kind: bytes) -> None:
    """An answer of one piece. kind: its content type."""
    headers = [(b"content-type", kind), (b"content-length", str(len(content)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": content})


def busy(why: str) -> ApiError:
    """Status 503, after which clients ask again."""
    return ApiError(503, f"the feature server is busy: {why}.", code="overloaded", retry_after=1)


def serve(
    target: FeatureTarget,
    config: FeaturesConfig,
    dtype: torch.dtype,
    needs: FeatureSpec,
    say: Callable[[str], None],
    loading: str = "",
) -> None:
    """Serve features until a signal, with one pass for all trainings, which read `needs` together.
    loading: how the target is loaded (`inference.target.settings.loading_text`).
    After the signal the process ends here, with status 0: threads may be inside torch, and an
    interpreter that exited around them was seen to abort. There is nothing left to write."""
    pair = config.ssl_certfile, config.ssl_keyfile
    # a single training asks for nothing twice
    room = int(config.shared_gib * GIB) if config.heads else 0
    shared = SharedPasses(needs, room)
    place = config.host, config.port, config.token()
    server = FeatureServer(target, dtype, *place, *pair, shared, loading)
    say(f"features of {target.info.id} in {server.precision} at {server.address}; Ctrl-C ends it")
    with ended_by_signals(server.end):
        server.run()
    if (close := getattr(target, "close", None)) is not None:
        close()  # files that vLLM servers have left for it
    say(f"stopped after {shared.answers} requests: {shared.passes} passes of the target")
    sys.stdout.flush()
    os._exit(0)
