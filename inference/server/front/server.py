"""The listening side: accepts connections within the limits, and ends them.

This module accepts connections itself. asyncio would log a traceback for each failed attempt, and
would not count a connection before its TLS handshake is done.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import select
import socket

from heads.api.errors import UserError
from inference.server.errors import ApiError
from inference.server.front.bodies import Bodies
from inference.server.front.connection import Connection
from inference.server.front.limits import connections_within
from inference.server.front.quiet import QuietLog
from inference.server.front.seats import Seat, Seats
from inference.server.front.secret import client_of
from inference.server.front.site import Site

logger = logging.getLogger(__name__)
BACKLOG = 4096
AT_ONCE = 64
"""Most connections that are accepted before other work gets its turn."""
PAUSE_SECONDS = 0.1
"""Pause after the system failed to accept a connection."""
TLS_END_SECONDS = 1.0


def bind(group: str, host: str, port: int) -> socket.socket:
    """A socket for `<group>.host` and `<group>.port`; raises `UserError` if the address is not
    available."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    found = socket.socket(family, socket.SOCK_STREAM)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((host.strip("[]"), port))
    except OSError as error:
        found.close()
        raise UserError(
            f"cannot listen on {host}:{port} ({error.strerror or error}). Set {group}.host or "
            f"{group}.port; {group}.port=0 takes a free one."
        ) from error
    return found


def url_of(listening: socket.socket, tls: bool) -> str:
    """The URL of a listening socket."""
    host, port = listening.getsockname()[:2]
    return f"http{'s' if tls else ''}://{f'[{host}]' if ':' in host else host}:{port}"


class HttpServer:
    """Serves `site` on a bound socket. Call all methods on one running event loop."""

    def __init__(self, site: Site, listening: socket.socket) -> None:
        self.site, self.listening = site, listening
        wanted = site.limits.connections
        self.seats = Seats(site.limits, connections_within(wanted))
        if self.seats.connections < wanted:
            logger.warning(
                "at most %d connections: the limit of open files (ulimit -n) allows no more",
                self.seats.connections,
            )
        self.bodies = Bodies(site.limits.bodies_bytes, self.seats)
        self._log = QuietLog(logger)
        self._tasks: set[asyncio.Task[None]] = set()
        self._open: set[Connection] = set()
        self._resumed: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Accept connections from now on."""
        self.listening.listen(BACKLOG)
        self.listening.setblocking(False)
        asyncio.get_running_loop().add_reader(self.listening, self._accept)

    async def close(self, seconds: float) -> None:
        """Stop accepting, end idle connections, and give the others `seconds` to end."""
        asyncio.get_running_loop().remove_reader(self.listening)
        if self._resumed is not None:
            self._resumed.cancel()
        self.listening.close()
        for connection in self._open:
            connection.closing = True
        self.seats.end_waiting()
        if self._tasks:
            _, rest = await asyncio.wait(set(self._tasks), timeout=seconds)
            for task in rest:
                task.cancel()
            await asyncio.gather(*rest, return_exceptions=True)

    def end_all(self) -> None:
        """End all connections at once; `close` then returns."""
        for task in set(self._tasks):
            task.cancel()

    def _accept(self) -> None:
        for _ in range(AT_ONCE):
            try:
                connection, address = self.listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # no descriptors, no memory
                if not is_readable(self.listening):
                    return  # no client waits: Linux allocates the descriptor first
                self._log.note("connections cannot be accepted", error.strerror or str(error))
                self.seats.displace_one()
                loop = asyncio.get_running_loop()
                loop.remove_reader(self.listening)
                self._resumed = loop.call_later(
                    PAUSE_SECONDS, loop.add_reader, self.listening, self._accept
                )
                return
            self._admit(connection, address[:2])

    def _admit(self, connection: socket.socket, peer: tuple[str, int]) -> None:
        """Start a task for a new connection, or turn it away."""
        connection.setblocking(False)
        before, client = self.seats.displaced, client_of(peer[0])
        seat = self.seats.take(client)
        if self.seats.displaced > before:
            self._log.note("a waiting connection was ended for a new one", client)
        if seat is None:
            self._log.note("a connection was refused: all others are being answered", client)
            turn_away(connection, secured=self.site.tls is not None)
            return
        task = asyncio.get_running_loop().create_task(self._serve(connection, seat, peer))
        seat.end = task.cancel
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, connection: socket.socket, seat: Seat, peer: tuple[str, int]) -> None:
        """Serve a connection from its handshake to its end."""
        found: Connection | None = None
        try:
            streams = await self._streams(connection)
            found = Connection(self.site, seat, self.bodies, streams, peer)
            self._open.add(found)
            await found.serve()
        except OSError:  # the handshake failed
            connection.close()
        except Exception:
            logger.exception("a connection failed")
        finally:
            if found is None:
                connection.close()
            else:
                self._open.discard(found)
            seat.leave()

    async def _streams(
        self, connection: socket.socket
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Reader and writer of a connection, after the TLS handshake if there is one."""
        loop, tls = asyncio.get_running_loop(), self.site.tls
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        reader = asyncio.StreamReader(loop=loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
        transport, _ = await loop.connect_accepted_socket(
            lambda: protocol,
            connection,
            ssl=tls,
            ssl_handshake_timeout=self.site.limits.header_seconds if tls else None,
            ssl_shutdown_timeout=TLS_END_SECONDS if tls else None,
        )
        return reader, asyncio.StreamWriter(transport, protocol, reader, loop)


def is_readable(listening: socket.socket) -> bool:
    """Whether a connection waits to be accepted. It uses no file descriptor."""
    poll = select.poll()
    poll.register(listening, select.POLLIN)
    return bool(poll.poll(0))


def turn_away(connection: socket.socket, secured: bool) -> None:
    """Close a connection without a seat, with an error response unless it uses TLS."""
    error = ApiError(
        503,
        "all connections that this server, or your address, may have are being answered. Ask again "
        "later.",
        code="overloaded",
        retry_after=1,
    )
    content = json.dumps(error.body).encode()
    head = (
        "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\nRetry-After: 1\r\nConnection: close\r\n\r\n"
    )
    with contextlib.suppress(OSError):
        if not secured:
            connection.send(head.encode() + content)
            connection.shutdown(socket.SHUT_WR)
    connection.close()
