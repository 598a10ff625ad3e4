"""Runs the server: it answers until a signal comes, lets running requests end, and exits."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

from inference.server.app import OPEN_PATHS, build_app
from inference.server.front.server import HttpServer
from inference.server.front.signals import ended_by_signals
from inference.server.front.site import Site
from inference.server.front.tls import server_context
from inference.server.service import Service

CLOSE_SECONDS = 5.0
"""How long connections may take to close once no request runs."""


class Server:
    """A service on a bound socket. The first signal drains it (new requests get 503, running ones
    end); the second ends it at once. failed: the engine has failed permanently. Raises `UserError`
    for certificates that cannot be used."""

    def __init__(
        self, service: Service, listening: socket.socket, started: Callable[[], None] = lambda: None
    ) -> None:
        config = service.config
        self.service, self.listening, self.started = service, listening, started
        self.site = Site(
            build_app(service),
            config.limits(service.engine.decode.batch_size),
            service.secret,
            OPEN_PATHS,
            server_context("serve", config.ssl_certfile, config.ssl_keyfile),
            service.refused,
        )
        self.failed = False
        self._end = asyncio.Event()
        self._forced = False
        self._draining: asyncio.Task[None] | None = None

    def run(self) -> None:
        """Serve until `end`."""
        asyncio.run(self._run())

    async def _run(self) -> None:
        self.service.loop = asyncio.get_running_loop()
        self.service.on_broken = self._broken
        front = HttpServer(self.site, self.listening)
        self.service.metrics.watch(front.seats)
        with ended_by_signals(self._signal):
            front.start()
            self.started()
            await self._end.wait()
            await front.close(0.0 if self._forced else CLOSE_SECONDS)

    def _signal(self) -> None:
        if self.service.loop is not None:
            self.service.loop.call_soon_threadsafe(self.end)

    def end(self) -> None:
        """End gracefully; the second call ends at once. Call it on the loop's thread."""
        if self._draining is None:
            self._draining = asyncio.get_running_loop().create_task(self._drain())
        else:
            self._forced = True
            self._end.set()

    async def _drain(self) -> None:
        await self.service.drain()
        self._end.set()

    def _broken(self) -> None:
        """Handle a permanent failure of the engine. Called on the worker's thread."""
        self.failed = True
        if self.service.loop is not None and not self.service.loop.is_closed():
            self.service.loop.call_soon_threadsafe(self.end)


def serve(
    service: Service, listening: socket.socket, started: Callable[[], None] = lambda: None
) -> int:
    """Serve until a signal ends it; returns the exit status: 0, or 1 if the engine failed. started:
    called once the server accepts requests."""
    server = Server(service, listening, started)
    service.start()
    try:
        server.run()
    finally:
        service.stop()
    return 1 if server.failed else 0
