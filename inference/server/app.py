"""The routes: answers in one piece and as server-sent events. Whoever comes here has shown the
token; requests are here in full (`inference.server.front`)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from dataclasses import replace
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from inference.measure.metrics import divide
from inference.server.admin import add_admin
from inference.server.errors import ApiError
from inference.server.front.body import read_json
from inference.server.front.secret import client_of
from inference.server.protocol import CHAT, TEXT, Asked, Envelope, Json, parse
from inference.server.scheduler import Done, Piece
from inference.server.service import Service, Ticket

DOMAIN_HEADER = "x-headstart-domain"
STORE_HEADER = "x-headstart-store"
OPEN_PATHS = frozenset(("/health", "/ready"))
"""Paths that need no token: what process supervisors look at."""


def build_app(service: Service) -> FastAPI:
    """The application of one server."""
    app = FastAPI(
        title="headstart",
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        exception_handlers=handlers(service),
    )

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await answer(service, request, CHAT)

    @app.post("/v1/completions")
    async def text(request: Request) -> Response:
        return await answer(service, request, TEXT)

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        return await count_tokens(service, request)

    @app.get("/v1/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [service.facts()]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        if name not in service.names:
            raise ApiError(404, f"there is no model '{name}' here.", "model", "model_not_found")
        return JSONResponse(service.facts())

    @app.get("/health")  # whether the engine lives; while draining it does
    async def health() -> Response:
        fine = service.scheduler.healthy
        return JSONResponse({"status": "ok" if fine else "failed"}, 200 if fine else 503)

    @app.get("/ready")  # whether requests are taken
    async def ready() -> Response:
        return JSONResponse({"ready": service.ready}, 200 if service.ready else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        shown = generate_latest(service.metrics.registry)
        return Response(shown, media_type=CONTENT_TYPE_PLAIN_0_0_4)

    add_admin(app, service.swaps, service.admin)
    return app


def handlers(service: Service) -> dict[int | type[Exception], Any]:
    """Who answers which error."""

    async def refuse(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return refusal(service, request, error)

    async def miss(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)  # a path or method that does not exist
        missing = f"there is no {request.method} {request.url.path} here."
        return JSONResponse(ApiError(error.status_code, missing).body, error.status_code)

    async def fail(request: Request, error: Exception) -> Response:
        # a bug of ours; the front logs it
        return refusal(service, request, ApiError(500, "the server failed to handle this request."))

    return {ApiError: refuse, HTTPException: miss, Exception: fail}


def refusal(service: Service, request: Request, error: ApiError) -> Response:
    """The response for an error, which is noted."""
    service.refused(request.method, error, client(request))
    return JSONResponse(error.body, error.status, error.headers)


def client(request: Request) -> str:
    """Who a request counts for."""
    return client_of(request.client.host if request.client else "")


# One request


async def answer(service: Service, request: Request, kind: str) -> Response:
    """Answer a completion request; raises `ApiError`."""
    created = time.monotonic()
    place = service.enter(client(request))
    try:
        asked = await read(service, request, kind)
        ticket = await service.ticket(asked, request.headers.get(DOMAIN_HEADER, ""), created, place)
    except BaseException:
        place.leave()
        raise
    watch = asyncio.create_task(watch_client(request, ticket))
    streams = False
    try:
        await ticket.start()
        envelope = Envelope(kind, ticket.job.id, service.name, int(time.time()), asked.ids)
        if asked.stream:
            streams = True
            return EventStream(ticket, envelope, asked, watch)
        while not isinstance(event := await ticket.next(), Done):
            pass
        figures = count(ticket, event)
        return JSONResponse(envelope.whole(event.text, event.finish, event.tokens, figures))
    finally:
        if not streams:
            watch.cancel()
            ticket.close()


async def read(service: Service, request: Request, kind: str) -> Asked:
    """What a request asks for; raises `ApiError`."""
    body = read_json(await request.body())
    asked = parse(kind, body, service.engine.decode.sampling(), service.names)
    allowed = request.headers.get(STORE_HEADER, "true").strip().lower() == "true"
    return asked if allowed else replace(asked, store=False)


async def count_tokens(service: Service, request: Request) -> Response:
    """vLLM's `/tokenize`: the token ids of a text or a conversation as a completion would read it;
    raises `ApiError`."""
    created = time.monotonic()
    place = service.enter(client(request))
    try:
        body = read_json(await request.body())
        if isinstance(body, dict):
            body["model"] = body.get("model") or service.name
        kind = CHAT if isinstance(body, dict) and "messages" in body else TEXT
        asked = parse(kind, body, service.engine.decode.sampling(), service.names)
        tokens = await service.tokens(asked, created, place)
    finally:
        place.leave()
    size = {"count": len(tokens), "max_model_len": service.context}
    return JSONResponse({**size, "tokens": list(tokens)})


async def watch_client(request: Request, ticket: Ticket) -> None:
    """Tell the ticket when its client leaves."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    ticket.leave()


def count(ticket: Ticket, done: Done) -> Json:
    """The tokens of an answer; its seed, which gives the answer again, and drafting's figures."""
    read, written, drafts = len(ticket.job.prompt), len(done.tokens), done.drafts
    usage = {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
    drafting = {
        "seed": ticket.job.seed,
        "verify_passes": drafts.passes,
        "accepted_drafts": drafts.accepted,
        "tau": divide(drafts.committed, drafts.passes) if drafts.passes else 1.0,
    }
    return {"usage": usage, "headstart": drafting}


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
        service, who = self.ticket.service, self.ticket.place.client

        async def out(content: Json | str, last: bool = False) -> None:
            data = content if isinstance(content, str) else json.dumps(content)
            body = b"" if last else f"data: {data}\n\n".encode()
            await send({"type": "http.response.body", "body": body, "more_body": not last})

        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            if self.envelope.kind == CHAT:
                await out(self.envelope.piece("", role="assistant"))
            while isinstance(event := await self.ticket.next(), Piece):
                await out(self.envelope.piece(event.text))
            await out(self.envelope.end(event.finish, event.tokens))
            if self.asked.usage:
                await out(self.envelope.usage(count(self.ticket, event)))
            await out("[DONE]")
            await out("", last=True)
        except ApiError as error:
            service.refused("POST", error, who)
            if error.status != 499:
                with contextlib.suppress(OSError):
                    await out(json.dumps(error.body))
                    await out("", last=True)
        except OSError:
            service.refused("POST", ApiError(499, "the client has left."), who)
            raise
        finally:
            self.watch.cancel()
            self.ticket.close()
