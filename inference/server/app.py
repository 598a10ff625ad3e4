"""The HTTP side: routes, the door (token, size, time), answers in one piece and as server-sent
events."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from inference.measure.metrics import divide
from inference.server.errors import ApiError
from inference.server.protocol import CHAT, TEXT, Asked, Drafting, Envelope, Json, Usage, parse
from inference.server.scheduler import Done, Piece
from inference.server.service import Service, Ticket

logger = logging.getLogger(__name__)
DOMAIN_HEADER = "x-headstart-domain"
OPEN_PATHS = ("/health", "/ready")
"""Paths that need no token: what process supervisors look at."""


class Routes:
    """What is served under which path."""

    def __init__(self, service: Service) -> None:
        self.service = service

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions"""
        return await answer(self.service, request, CHAT)

    async def text(self, request: Request) -> Response:
        """POST /v1/completions"""
        return await answer(self.service, request, TEXT)

    async def models(self) -> Response:
        """GET /v1/models"""
        return JSONResponse({"object": "list", "data": [self.service.facts()]})

    async def model(self, name: str) -> Response:
        """GET /v1/models/<name>"""
        if name not in self.service.names:
            raise ApiError(404, f"there is no model '{name}' here.", "model", "model_not_found")
        return JSONResponse(self.service.facts())

    async def health(self) -> Response:
        """GET /health: whether the engine lives; while draining it does."""
        fine = self.service.scheduler.healthy
        return JSONResponse({"status": "ok" if fine else "failed"}, 200 if fine else 503)

    async def ready(self) -> Response:
        """GET /ready: whether requests are taken."""
        return JSONResponse({"ready": self.service.ready}, 200 if self.service.ready else 503)

    async def metrics(self) -> Response:
        """GET /metrics"""
        text = generate_latest(self.service.metrics.registry)
        return Response(text, media_type=CONTENT_TYPE_PLAIN_0_0_4)

    async def api_error(self, request: Request, error: Exception) -> Response:
        """What was refused."""
        assert isinstance(error, ApiError)
        if request.method == "POST":
            self.service.refused(error)
        return JSONResponse(error.body, error.status, error.headers)

    async def http_error(self, request: Request, error: Exception) -> Response:
        """A path or method that does not exist."""
        assert isinstance(error, HTTPException)
        missing = f"there is no {request.method} {request.url.path} here."
        return JSONResponse(ApiError(error.status_code, missing).body, error.status_code)


def build_app(service: Service) -> FastAPI:
    """The application of one server."""
    app = FastAPI(title="headstart", docs_url=None, redoc_url=None, openapi_url=None)
    routes = Routes(service)
    served: dict[str, tuple[str, Callable[..., Awaitable[Response]]]] = {
        "/v1/chat/completions": ("POST", routes.chat),
        "/v1/completions": ("POST", routes.text),
        "/v1/models": ("GET", routes.models),
        "/v1/models/{name:path}": ("GET", routes.model),
        "/health": ("GET", routes.health),
        "/ready": ("GET", routes.ready),
        "/metrics": ("GET", routes.metrics),
    }
    for path, (method, function) in served.items():
        app.add_api_route(path, function, methods=[method], response_model=None)
    app.add_exception_handler(ApiError, routes.api_error)
    app.add_exception_handler(HTTPException, routes.http_error)
    app.add_middleware(Door, service=service)
    return app


class Door:
    """In front of everything: the token, and the last resort for failures of our own, of which
    clients learn nothing but that."""

    def __init__(
        self, app: Callable[[Scope, Receive, Send], Awaitable[None]], service: Service
    ) -> None:
        self.app, self.service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request in or answer it."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        begun = False

        async def watched(message: Any) -> None:
            nonlocal begun
            begun = begun or message["type"] == "http.response.start"
            await send(message)

        secret = self.service.secret
        if secret is not None and scope["path"] not in OPEN_PATHS:
            headers = dict(scope["headers"])
            if not secret.matches(headers.get(b"authorization", b"").decode("latin-1")):
                error = ApiError(
                    401,
                    "a valid bearer token is needed: 'Authorization: Bearer <token>'.",
                    code="invalid_api_key",
                )
                if scope["method"] == "POST":
                    self.service.refused(error)
                await JSONResponse(error.body, 401, error.headers)(scope, receive, send)
                return
        try:
            await self.app(scope, receive, watched)
        except Exception:
            # a bug of ours must end one request, not the connection's others, and must not show its
            # insides
            logger.exception("a request failed")
            if not begun:
                error = ApiError(500, "the server failed to handle this request.")
                self.service.refused(error)
                await JSONResponse(error.body, 500)(scope, receive, send)


# One request


async def answer(service: Service, request: Request, kind: str) -> Response:
    """Answer a completion request; raises `ApiError`."""
    created = time.monotonic()
    with service.entrance():
        body = await read_body(service, request)
        asked = parse(kind, body, service.engine.decode.sampling(), service.names)
        ticket = await service.ticket(asked, request.headers.get(DOMAIN_HEADER, ""), created)
    watch = asyncio.create_task(watch_client(request, ticket))
    streams = False
    try:
        await ticket.start()
        envelope = Envelope(kind, ticket.job.id, service.name, int(time.time()))
        if asked.stream:
            streams = True
            return EventStream(ticket, envelope, asked, watch)
        return JSONResponse(await whole_answer(ticket, envelope, asked))
    finally:
        if not streams:
            watch.cancel()
            ticket.close()


async def read_body(service: Service, request: Request) -> Any:
    """The request's JSON; raises `ApiError` for one that is too large, too slow, or no JSON."""
    most = service.config.body_kilobytes * 1024
    too_large = ApiError(413, f"a request may have {most} bytes.", code="request_too_large")
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > most:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(service.config.body_seconds):
            async for part in request.stream():
                body += part
                if len(body) > most:
                    raise too_large
    except TimeoutError as error:
        raise ApiError(
            408, f"the request did not arrive within {service.config.body_seconds:g} s."
        ) from error
    except ClientDisconnect as error:
        raise ApiError(499, "the client has left.") from error
    try:
        return json.loads(bytes(body))
    except (ValueError, RecursionError) as error:
        raise ApiError(400, "the body is not JSON.", code="invalid_json") from error


async def watch_client(request: Request, ticket: Ticket) -> None:
    """Tell the ticket when its client leaves."""
    while True:
        if (await request.receive())["type"] == "http.disconnect":
            ticket.leave()
            return


async def whole_answer(ticket: Ticket, envelope: Envelope, asked: Asked) -> Json:
    """Wait for an answer's end."""
    while True:
        event = await ticket.next()
        if isinstance(event, Done):
            ids = event.tokens if asked.ids else None
            return envelope.whole(event.text, event.finish, *figures(ticket, event), ids)


def figures(ticket: Ticket, done: Done) -> tuple[Usage, Drafting]:
    """The tokens and the drafting of an answer."""
    prompt, answer = len(ticket.job.prompt), len(done.tokens)
    tau = divide(done.committed, done.passes) if done.passes else 1.0
    return (
        Usage(prompt_tokens=prompt, completion_tokens=answer, total_tokens=prompt + answer),
        Drafting(
            seed=ticket.job.seed, verify_passes=done.passes, accepted_drafts=done.accepted, tau=tau
        ),
    )


class EventStream(Response):
    """An answer as server-sent events. A client that does not read for `serve.write_seconds` counts
    as gone."""

    media_type = "text/event-stream"

    def __init__(
        self, ticket: Ticket, envelope: Envelope, asked: Asked, watch: asyncio.Task[None]
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self.ticket, self.envelope, self.asked, self.watch = ticket, envelope, asked, watch

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream. What fails once it has begun is its last event."""
        service = self.ticket.service

        async def out(data: str, last: bool = False) -> None:
            body = b"" if last else f"data: {data}\n\n".encode()
            async with asyncio.timeout(service.config.write_seconds):
                await send({"type": "http.response.body", "body": body, "more_body": not last})

        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await self._events(out)
        except ApiError as error:
            service.refused(error)
            if error.status != 499:
                with contextlib.suppress(TimeoutError, OSError):
                    await out(json.dumps(error.body))
                    await out("", last=True)
        except (TimeoutError, OSError):
            service.refused(ApiError(499, "the client has left."))
        finally:
            self.watch.cancel()
            self.ticket.close()

    async def _events(self, out: Callable[..., Awaitable[None]]) -> None:
        ticket, envelope = self.ticket, self.envelope
        if envelope.kind == CHAT:
            await out(json.dumps(envelope.piece("", first=True)))
        while True:
            event = await ticket.next()
            if isinstance(event, Piece):
                await out(json.dumps(envelope.piece(event.text)))
                continue
            ids = event.tokens if self.asked.ids else None
            await out(json.dumps(envelope.piece(None, event.finish, ids=ids)))
            if self.asked.usage:
                await out(json.dumps(envelope.usage(*figures(ticket, event))))
            await out("[DONE]")
            await out("", last=True)
            return
