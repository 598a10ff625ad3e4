"""A front on loopback with a small application behind it, and bare sockets for it."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from inference.server.errors import ApiError
from inference.server.front.limits import Limits
from inference.server.front.secret import Secret
from inference.server.front.server import HttpServer, bind
from inference.server.front.site import Message, Receive, Send, Site


class Served:
    """A front that runs. refused: (method, status, client) of what it refused; bodies: lengths of
    what reached the application; gate: what /slow and /open wait for; no token is needed for
    /health and /open."""

    def __init__(self, limits: Limits, token: str = "", tls: ssl.SSLContext | None = None) -> None:
        self.refused: list[tuple[str, int, str]] = []
        self.bodies: list[int] = []
        self.left = threading.Event()
        secret = Secret(token.encode()) if token else None
        self.site = Site(
            self._app, limits, secret, frozenset(("/health", "/open")), tls, self._refused
        )
        self.listening = bind("serve", "127.0.0.1", 0)
        self.port: int = self.listening.getsockname()[1]
        self._begun = threading.Event()
        self.thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self.thread.start()
        assert self._begun.wait(30)

    async def _run(self) -> None:
        self.loop, self.end, self.gate = (
            asyncio.get_running_loop(),
            asyncio.Event(),
            asyncio.Event(),
        )
        self.front = HttpServer(self.site, self.listening)
        self.front.start()
        self._begun.set()
        await self.end.wait()
        await self.front.close(2.0)

    def _refused(self, method: str, error: ApiError, client: str) -> None:
        self.refused.append((method, error.status, client))

    async def _app(self, scope: Message, receive: Receive, send: Send) -> None:
        body = (await receive())["body"]
        self.bodies.append(len(body))
        if scope["path"] == "/fail":
            raise RuntimeError("secret insides")
        if scope["path"] == "/fail/file":
            raise FileNotFoundError("secret insides")
        if scope["path"] == "/refuse":
            raise ApiError(409, "no.")
        if scope["path"] in ("/slow", "/open"):
            await self.gate.wait()
        if scope["path"] == "/watch":
            assert (await receive())["type"] == "http.disconnect"
            self.left.set()
            return
        content = bytes(8 << 20) if scope["path"] == "/large" else json.dumps(len(body)).encode()
        length = (b"content-length", str(len(content)).encode())
        await send({"type": "http.response.start", "status": 200, "headers": [length]})
        await send({"type": "http.response.body", "body": content})

    def open_gate(self) -> None:
        self.loop.call_soon_threadsafe(self.gate.set)

    def connect(self, source: str = "127.0.0.1") -> socket.socket:
        """A connection from an address of this machine."""
        return socket.create_connection(("127.0.0.1", self.port), 20, (source, 0))

    def ask(self, data: bytes, source: str = "127.0.0.1") -> tuple[int, Any]:
        """Status and JSON of the answer to what is sent on a connection of its own."""
        with self.connect(source) as connection:
            connection.sendall(data)
            return answer(connection)


def answer(connection: socket.socket) -> tuple[int, Any]:
    """Status and JSON of the next answer on a connection; (0, None) when it was closed."""
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        if not (data := connection.recv(1)):
            return 0, None
        head += data
    (length,) = re.findall(rb"(?i)content-length: (\d+)", head)
    body = b""
    while len(body) < int(length) and (data := connection.recv(int(length) - len(body))):
        body += data
    return int(head.split()[1]), json.loads(body)


def closed(connection: socket.socket) -> bool:
    """Whether the other end has closed a connection, in the next seconds."""
    try:
        while connection.recv(65536):
            pass
    except TimeoutError:
        return False
    except OSError:
        return True
    return True


@contextmanager
def served(token: str = "", tls: ssl.SSLContext | None = None, **limits: Any) -> Iterator[Served]:
    """A front with these limits until the block ends."""
    found = Served(Limits(**limits), token, tls)
    try:
        yield found
    finally:
        found.open_gate()
        found.loop.call_soon_threadsafe(found.end.set)
        found.thread.join(20)
        assert not found.thread.is_alive(), "the front did not end"


def certificate(folder: Path, name: str = "server") -> tuple[str, str]:
    """A self-signed certificate for 127.0.0.1 and its key, by the `openssl` program."""
    pair = str(folder / f"{name}.pem"), str(folder / f"{name}.key")
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
            *("-nodes", "-days", "2", "-subj", "/CN=headstart test"),
            *("-addext", "subjectAltName=IP:127.0.0.1", "-out", pair[0], "-keyout", pair[1]),
        ],
        check=True,
        capture_output=True,
    )
    return pair
