"""Runs the server: binds, answers until a signal comes, lets running requests end, and goes."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType

import uvicorn

from heads.api.errors import UserError
from inference.server.app import build_app
from inference.server.config import ServeConfig
from inference.server.service import Service

SIGNALS = (signal.SIGINT, signal.SIGTERM)
CLOSE_SECONDS = 5
"""How long connections may take to close once nothing runs any more."""


def bind(config: ServeConfig) -> socket.socket:
    """A listening socket; raises `UserError` when the address cannot be had."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    found = socket.socket(family, socket.SOCK_STREAM)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((config.host.strip("[]"), config.port))
    except OSError as error:
        found.close()
        raise UserError(
            f"cannot listen on {config.host}:{config.port} ({error.strerror or error}). Set "
            "serve.host or serve.port; serve.port=0 takes a free one."
        ) from error
    return found


class Server(uvicorn.Server):
    """uvicorn with our way to end: the first signal drains (new requests get 503, running ones
    end), the second ends at once."""

    def __init__(self, service: Service, started: Callable[[], None] = lambda: None) -> None:
        config = uvicorn.Config(
            build_app(service),
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_keep_alive=30,
            timeout_graceful_shutdown=CLOSE_SECONDS,
            server_header=False,
        )
        super().__init__(config)
        self.service, self.started_serving = service, started
        self.failed = False
        self._draining: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self.service.loop = asyncio.get_running_loop()
        self.service.on_broken = self._broken
        await super().startup(sockets)
        self.started_serving()

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Handle signals while serving. Unlike uvicorn's, they are not raised again afterwards:
        what was asked for was done."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._signal) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _signal(self, number: int, frame: FrameType | None) -> None:
        if self.service.loop is None:  # before it listens
            self.should_exit = True
        else:
            self.service.loop.call_soon_threadsafe(self.end)

    def end(self) -> None:
        """End gracefully; the second call ends at once. On the loop's thread."""
        if self._draining is None:
            self._draining = asyncio.get_running_loop().create_task(self._drain())
        else:
            self.should_exit = self.force_exit = True

    async def _drain(self) -> None:
        await self.service.drain()
        self.should_exit = True

    def _broken(self) -> None:
        """The engine has failed for good. On the worker's thread."""
        self.failed = True
        if self.service.loop is not None and not self.service.loop.is_closed():
            self.service.loop.call_soon_threadsafe(self.end)


def serve(
    service: Service, listening: socket.socket, started: Callable[[], None] = lambda: None
) -> int:
    """Serve until a signal ends it; returns the exit status: 0, or 1 when the engine failed.
    started: called when requests are taken."""
    service.start()
    server = Server(service, started)
    try:
        server.run(sockets=[listening])
    finally:
        service.stop()
        listening.close()
    return 1 if server.failed else 0
