"""One connection: reads requests within the limits and lets the application answer them.

h11 parses HTTP. The checks of a request are, in this order: headers in time, the token, an
acceptable length, a body in time. Only then is the request passed to the application. A request
without a valid token is not read beyond its headers. On paths that need no token, it yields its
place to requests with one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Iterable
from email.utils import formatdate
from typing import cast
from urllib.parse import unquote

import h11

from inference.server.errors import ApiError, ClientGoneError
from inference.server.front.bodies import Bodies
from inference.server.front.seats import Seat
from inference.server.front.site import Message, Site

logger = logging.getLogger(__name__)
PIECE = 1 << 20
"""Most bytes that are written at a time."""
READ = 1 << 16
LINGER_SECONDS, LINGER_BYTES = 2.0, 16 << 20
"""How long, and how many bytes, a refused client may continue to send: closing at once would
destroy the answer on its way."""
HEADERS_TOO_LARGE = 431
MOST_SAID = 300
"""Most characters of a reason, which may quote what the client sent."""


class Answer:
    """ASGI's receive and send for one request. begun, complete: the progress of the answer."""

    def __init__(self, connection: Connection, request: h11.Request, body: bytes) -> None:
        self._connection, self._body = connection, [body]
        self._has_body = request.method != b"HEAD"
        self.begun = self.complete = False

    async def receive(self) -> Message:
        """The body, which was read already; after that, the client's disconnect."""
        if self._body:
            return {"type": "http.request", "body": self._body.pop(), "more_body": False}
        await self._connection.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        """Send a part of the answer; raises `ClientGoneError`."""
        connection = self._connection
        if connection.left.is_set():
            raise ClientGoneError("the client has left")
        if message["type"] == "http.response.start":
            self.begun = True
            await connection.begin(message["status"], message.get("headers", ()))
            return
        await connection.write_body(message.get("body", b"") if self._has_body else b"")
        if not message.get("more_body", False):
            await connection.end()
            self.complete = True


class Connection:
    """See the module. peer: host and port, for the application. left: set once the client has
    left; closing: no request is read after the one that is being answered."""

    def __init__(
        self,
        site: Site,
        seat: Seat,
        bodies: Bodies,
        streams: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        peer: tuple[str, int],
    ) -> None:
        self.site, self.limits, self.seat, self.bodies = site, site.limits, seat, bodies
        self.peer = peer
        self.reader, self.writer = streams
        # `drain` returns when the system has taken everything (with high=0, a TLS transport never
        # returns)
        self.writer.transport.set_write_buffer_limits(high=1, low=0)
        self.http = h11.Connection(h11.SERVER, self.limits.header_bytes)
        self.closing = False
        self.left = asyncio.Event()

    async def serve(self) -> None:
        """Answer requests until either side ends the connection."""
        try:
            while await self._exchange() and not self.closing:
                self.http.start_next_cycle()
                self.seat.waiting()
        except OSError:  # the client has left, or does not read its answer
            self.writer.transport.abort()
        except asyncio.CancelledError:  # ended to make room for others
            self.writer.transport.abort()
            raise
        finally:
            self.bodies.release(self.seat)
            self.writer.close()

    async def _exchange(self) -> bool:
        """Handle one request and its answer; returns whether another one may follow."""
        request = None
        try:
            request = await self._head()
            if request is None:
                return False
            vouched = self._require_token(request)
            body = await self._body(request, self.limits.body_bytes if vouched else 0)
        except ApiError as error:
            await self._refuse(request, error)
            return False
        if vouched:
            self.seat.answering()
        whole = await self._answer(request, body)
        self.bodies.release(self.seat)
        done = self.http.our_state is h11.DONE and self.http.their_state is h11.DONE
        return whole and done and not self.left.is_set()

    # The request

    async def _head(self) -> h11.Request | None:
        """The next request's line and headers, None if no request comes; raises `ApiError`."""
        limits = self.limits
        try:
            if not self.http.trailing_data[0]:
                async with asyncio.timeout(limits.idle_seconds):
                    self.http.receive_data(await self.reader.read(READ))
            async with asyncio.timeout(limits.header_seconds):
                event = await self._event()
        except TimeoutError:
            if not self.http.trailing_data[0]:
                return None
            message = f"the headers did not arrive within {limits.header_seconds:g} s."
            raise ApiError(408, message, code="request_timeout") from None
        return event if isinstance(event, h11.Request) else None

    async def _event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """The client's next event; raises `ApiError` for invalid HTTP."""
        while True:
            try:
                event = self.http.next_event()
            except h11.RemoteProtocolError as error:
                if self.reader.at_eof():
                    self.left.set()
                    raise ApiError(499, "the client has left.") from error
                status, message = error.error_status_hint, f"the request is not HTTP ({error})."
                if status == HEADERS_TOO_LARGE:
                    message = f"the headers have more than {self.limits.header_bytes} bytes."
                raise ApiError(status, message[:MOST_SAID], code="invalid_http") from error
            if event is not h11.NEED_DATA:
                return cast("h11.Event | type[h11.PAUSED]", event)
            self.http.receive_data(await self.reader.read(READ))

    def _require_token(self, request: h11.Request) -> bool:
        """Whether a request has the token, or the server needs none; raises `ApiError` if the path
        needs one. A request without a token on an open path must not take the place of others."""
        secret, path = self.site.secret, request.target.partition(b"?")[0]
        if secret is None:
            return True
        given = [value for name, value in request.headers if name == b"authorization"]
        if len(given) == 1 and secret.matches(given[0]):
            return True
        if path.decode("ascii") not in self.site.open_paths:
            message = "a valid bearer token is needed: 'Authorization: Bearer <token>'."
            raise ApiError(401, message, code="invalid_api_key")
        return False

    async def _body(self, request: h11.Request, most: int) -> bytes:
        """A request's body of at most `most` bytes; raises `ApiError`."""
        seconds = self.limits.body_seconds
        large = ApiError(413, f"a request may have {most} bytes.", code="request_too_large")
        length = dict(request.headers).get(b"content-length", b"0")
        if int(length) > most:  # h11 has checked that these are digits
            raise large
        self.seat.waiting()
        body = bytearray()
        try:
            async with asyncio.timeout(seconds):
                if self.http.they_are_waiting_for_100_continue:
                    go_on = h11.InformationalResponse(status_code=100, headers=[])
                    await self._write(self.http.send(go_on))
                while isinstance(event := await self._event(), h11.Data):
                    if len(body) + len(event.data) > most:
                        raise large
                    self.bodies.add(self.seat, len(event.data))
                    body += event.data
        except TimeoutError as error:
            message = f"the request did not arrive within {seconds:g} s."
            raise ApiError(408, message, code="request_timeout") from error
        self.bodies.complete(self.seat)
        return bytes(body)

    # The answer

    async def _answer(self, request: h11.Request, body: bytes) -> bool:
        """Let the application answer; returns whether it answered in full."""
        answer, error = Answer(self, request, body), None
        watch = asyncio.create_task(self._watch())
        try:
            await self.site.app(self._scope(request), answer.receive, answer.send)
        except ApiError as given:
            error = given
        except ClientGoneError:
            raise
        except Exception:
            # a bug must end only this request, not the server, and must not expose internals
            logger.exception("a request failed")
            error = ApiError(500, "the server failed to handle this request.")
        finally:
            watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watch
        if error is not None and not answer.begun:
            await self._refuse(request, error)
        return answer.complete

    async def _watch(self) -> None:
        """Detect that the client leaves. Data that it sends meanwhile is kept for later, up to the
        size limit of headers."""
        while len(self.http.trailing_data[0]) <= self.limits.header_bytes:
            data = b""
            with contextlib.suppress(OSError):
                data = await self.reader.read(READ)
            if not data:
                self.left.set()
                return
            self.http.receive_data(data)

    def _scope(self, request: h11.Request) -> Message:
        """The request as an ASGI scope."""
        path, _, query = request.target.partition(b"?")
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": request.http_version.decode("ascii"),
            "method": request.method.decode("ascii"),
            "scheme": "https" if self.site.tls else "http",
            "path": unquote(path.decode("ascii")),
            "raw_path": path,
            "query_string": query,
            "root_path": "",
            "headers": list(request.headers),
            "client": self.peer,
            "server": self.writer.get_extra_info("sockname")[:2],
        }

    async def _refuse(self, request: h11.Request | None, error: ApiError) -> None:
        """Answer with an error, and discard what the client is still sending."""
        self.bodies.release(self.seat)
        method = request.method.decode("ascii") if request is not None else ""
        self.site.refused(method, error, self.seat.client)
        if self.left.is_set():
            return
        self.seat.waiting()
        content = json.dumps(error.body).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(content)).encode()),
            (b"connection", b"close"),
            *((name.lower().encode(), value.encode()) for name, value in error.headers.items()),
        ]
        await self.begin(error.status, headers)
        await self.write_body(b"" if method == "HEAD" else content)
        await self.end()
        if self.http.their_state in (h11.IDLE, h11.SEND_BODY, h11.ERROR):
            await self._linger()

    async def _linger(self) -> None:
        if self.writer.can_write_eof():
            self.writer.write_eof()
        left = LINGER_BYTES
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_SECONDS):
                while left > 0 and (data := await self.reader.read(READ)):
                    left -= len(data)

    async def begin(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Send an answer's headers."""
        dated = [(b"date", formatdate(usegmt=True).encode()), *headers]
        await self._write(self.http.send(h11.Response(status_code=status, headers=dated)))

    async def write_body(self, content: bytes) -> None:
        """Send a part of an answer's body."""
        view = memoryview(content)
        for start in range(0, len(view), PIECE):
            data = h11.Data(data=cast(bytes, view[start : start + PIECE]))
            parts = self.http.send_with_data_passthrough(data) or ()
            # at once: whoever is cancelled while it waits leaves no chunk without its data
            await self._write(b"".join(parts))

    async def end(self) -> None:
        """Send the end of an answer."""
        await self._write(self.http.send(h11.EndOfMessage()))

    async def _write(self, data: bytes | None) -> None:
        """Write data to the socket; raises `ClientGoneError`."""
        if not data:
            return
        try:
            async with asyncio.timeout(self.limits.write_seconds):
                self.writer.write(data)
                await self.writer.drain()
        except OSError as error:
            raise ClientGoneError(str(error)) from error
