"""The routes: answers in one piece and as server-sent events. The front has checked the token and
read the request in full (`inference.server.front`)."""

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

from inference.server.admin import add_admin
from inference.server.answer import Answer
from inference.server.envelope import Json
from inference.server.errors import ApiError, ClientGoneError
from inference.server.front.body import read_json
from inference.server.front.secret import client_of
from inference.server.protocol import CHAT, TEXT, Asked, parse
from inference.server.service import Service, installed_version

DOMAIN_HEADER = "x-headstart-domain"
STORE_HEADER = "x-headstart-store"
OPEN_PATHS = frozenset(("/health", "/ready"))
"""Paths that need no token: process supervisors use them."""


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

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        return await write_tokens(service, request)

    @app.get("/version")
    async def version() -> Response:
        return JSONResponse({"version": installed_version()})

    @app.get("/v1/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [service.facts()]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        if name not in service.names:
            raise ApiError(404, f"there is no model '{name}' here.", "model", "model_not_found")
        return JSONResponse(service.facts())

    @app.get("/health")  # whether the engine works, also while draining
    async def health() -> Response:
        fine = service.scheduler.healthy
        return JSONResponse({"status": "ok" if fine else "failed"}, 200 if fine else 503)

    @app.get("/ready")  # whether the server accepts requests
    async def ready() -> Response:
        return JSONResponse({"ready": service.ready}, 200 if service.ready else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        shown = generate_latest(service.metrics.registry)
        return Response(shown, media_type=CONTENT_TYPE_PLAIN_0_0_4)

    add_admin(app, service.swaps, service.admin, service.samples)
    return app


def handlers(service: Service) -> dict[int | type[Exception], Any]:
    """The handler of each kind of error."""

    async def refuse(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return refusal(service, request, error)

    async def miss(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)  # a path or method that does not exist
        missing = f"there is no {request.method} {request.url.path} here."
        return JSONResponse(ApiError(error.status_code, missing).body, error.status_code)

    async def fail(request: Request, error: Exception) -> Response:
        if isinstance(error, ClientGoneError):  # noted by the answer; this response is not read
            return Response(status_code=499)
        # a bug in the server; the front logs it
        return refusal(service, request, ApiError(500, "the server failed to handle this request."))

    return {ApiError: refuse, HTTPException: miss, Exception: fail}


def refusal(service: Service, request: Request, error: ApiError) -> Response:
    """Note an error and return its response."""
    service.refused(request.method, error, client(request))
    return JSONResponse(error.body, error.status, error.headers)


def client(request: Request) -> str:
    """The client that a request counts for."""
    return client_of(request.client.host if request.client else "")


# One request


async def answer(service: Service, request: Request, kind: str) -> Response:
    """Answer a completion request; raises `ApiError`."""
    created = time.monotonic()
    place = service.enter(client(request))
    try:
        asked = await read(service, request, kind)
        domain = request.headers.get(DOMAIN_HEADER, "")
        tickets = await service.tickets(asked, domain, created, place)
    except BaseException:
        place.leave()
        raise
    under_way = Answer(service, asked, tickets)
    watch = asyncio.create_task(watch_client(request, under_way))
    streams = False
    try:
        await tickets[0].start()
        if asked.stream:
            streams = True
            return EventStream(under_way, watch)
        return JSONResponse(await under_way.whole())
    finally:
        if not streams:
            watch.cancel()
            under_way.close()


async def read(service: Service, request: Request, kind: str) -> Asked:
    """What a request asks for; raises `ApiError`."""
    body = read_json(await request.body())
    asked = parse(kind, body, service.engine.decode.sampling(), service.names)
    allowed = request.headers.get(STORE_HEADER, "true").strip().lower() == "true"
    return asked if allowed else replace(asked, store=False)


async def count_tokens(service: Service, request: Request) -> Response:
    """vLLM's `/tokenize`: the token ids of a text or a conversation, as a completion would read
    it. Raises `ApiError`."""
    created = time.monotonic()
    place = service.enter(client(request))
    try:
        body = read_json(await request.body())
        strings = False
        if isinstance(body, dict):
            body["model"] = body.get("model") or service.name
            strings = body.pop("return_token_strs", None) is True
        kind = CHAT if isinstance(body, dict) and "messages" in body else TEXT
        asked = parse(kind, body, service.engine.decode.sampling(), service.names)
        if len(asked.prompts) != 1:
            raise ApiError(400, f"one prompt at a time; given {len(asked.prompts)}.", "prompt")
        tokens = await service.tokens(asked, asked.prompts[0], created, place)
    finally:
        place.leave()
    size: Json = {"count": len(tokens), "max_model_len": service.context}
    if strings:
        service.require_tokens(tokens, "prompt")
        size["token_strs"] = [service.texts.text(token) for token in tokens]
    return JSONResponse({**size, "tokens": list(tokens)})


async def write_tokens(service: Service, request: Request) -> Response:
    """vLLM's `/detokenize`: the text of token ids, special tokens included. Raises `ApiError`."""
    body = read_json(await request.body())
    given = body.get("tokens") if isinstance(body, dict) else None
    if not isinstance(given, list) or not all(type(token) is int for token in given):
        raise ApiError(422, "'tokens' must be a list of token ids.", "tokens", "wrong_type")
    if (model := body.get("model")) not in (None, *service.names):
        message = f"there is no model '{model}' here; served is '{service.name}'."
        raise ApiError(404, message, "model", "model_not_found")
    tokens = tuple(given)
    service.require_tokens(tokens, "list")
    return JSONResponse({"prompt": service.texts.prompt(tokens)})


async def watch_client(request: Request, under_way: Answer) -> None:
    """Call `leave` on the answer when its client leaves."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    under_way.leave()


class EventStream(Response):
    """An answer as server-sent events. A client that does not read for `serve.write_seconds` counts
    as having left."""

    media_type = "text/event-stream"

    def __init__(self, under_way: Answer, watch: asyncio.Task[None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self.under_way, self.watch = under_way, watch

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream. An error after its beginning becomes its last event."""
        service, who = self.under_way.service, self.under_way.tickets[0].place.client
        one_at_a_time = asyncio.Lock()

        async def out(content: Json | str, last: bool = False) -> None:
            data = content if isinstance(content, str) else json.dumps(content)
            body = b"" if last else f"data: {data}\n\n".encode()
            async with one_at_a_time:
                await send({"type": "http.response.body", "body": body, "more_body": not last})

        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await self.under_way.stream(out)
            await out("[DONE]")
            await out("", last=True)
        except ApiError as error:
            service.refused("POST", error, who)
            if error.status != 499:
                with contextlib.suppress(ClientGoneError):
                    await out(json.dumps(error.body))
                    await out("", last=True)
        except ClientGoneError:
            service.refused("POST", ApiError(499, "the client has left."), who)
            raise
        finally:
            self.watch.cancel()
            self.under_way.close()
