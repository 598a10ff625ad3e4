"""A relay in front of an engine that serves an exported drafter: it passes requests and answers
through, and samples answers for a learner, as `headstart serve` does.

Requests for a completion also ask for token ids (`return_token_ids` of vLLM's API), so that no text
is tokenised again; their answers contain these ids. Everything else passes unchanged, including the
engine's errors. An answer that the relay cannot read is passed through and not sampled.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Any

import httpx

from heads.api.errors import UserError
from inference.server.config import ServeConfig
from inference.server.errors import ApiError, ClientGoneError
from inference.server.front.quiet import QuietLog
from inference.server.front.secret import client_of
from inference.server.front.server import HttpServer
from inference.server.front.signals import ended_by_signals
from inference.server.front.site import Message, Receive, Send, Site
from inference.server.recorder import Recorder
from inference.server.samples import SampledAnswer, TrafficSamples

logger = logging.getLogger(__name__)
SAMPLED = frozenset(("/v1/chat/completions", "/v1/completions"))
OPEN_PATHS = frozenset(("/health",))
"""Paths that need no token of the relay."""
OWN_HEADERS = frozenset(
    (
        *(b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"te"),
        *(b"trailer", b"transfer-encoding", b"upgrade", b"date"),
    )
)
"""Headers of one connection, which are not passed on (RFC 9110, section 7.6.1), and the date, which
the front writes."""
REPLACED = frozenset((b"host", b"content-length", b"accept-encoding"))
"""Headers of a request that the relay writes itself."""
STORE_HEADER, DOMAIN_HEADER = b"x-headstart-store", b"x-headstart-domain"
ENDED = {"stop": "stop", "length": "length", "tool_calls": "stop"}
"""How an engine says that an answer has ended, and how samples say it."""
LARGEST_ID = 2**31 - 1
NESTED = (ValueError, RecursionError)
"""Raised by `json` for text that is not JSON, or is nested too deeply."""
LARGEST_READ = 64 << 20
"""Bytes of an answer that is read for its token ids; a longer one is not sampled."""
CONNECT_SECONDS = 10.0
Json = dict[str, Any]


@dataclass
class Choice:
    """Token ids of one choice of an answer. finish: how it ended, empty while it has not."""

    prompt: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    finish: str = ""


class AnswerReader:
    """Reads the token ids of an answer while its bytes pass. stream: the answer is a stream of
    server-sent events, else one JSON object."""

    def __init__(self, stream: bool) -> None:
        self.stream, self.readable = stream, True
        self.choices: dict[int, Choice] = {}
        self.ids = False
        """Whether there are any token ids."""
        self._prompt: list[int] = []
        self._rest, self._bytes = bytearray(), 0

    def feed(self, part: bytes) -> None:
        """Take the next bytes."""
        self._bytes += len(part)
        if not self.readable or self._bytes > LARGEST_READ:
            self.readable = False
            self._rest.clear()
            return
        self._rest += part
        if self.stream:
            *lines, rest = self._rest.split(b"\n")
            self._rest = bytearray(rest)
            for line in lines:
                if line.startswith(b"data:") and (data := line[5:].strip()) != b"[DONE]":
                    self._read(data)

    def end(self) -> list[Choice]:
        """The choices that have ended, with their token ids; empty for an answer without."""
        if not self.stream:
            self._read(self._rest)
        found = self.choices.values() if self.readable else ()
        return [one for one in found if one.finish in ENDED and one.prompt and one.tokens]

    def _read(self, data: bytes | bytearray) -> None:
        try:
            self._take(json.loads(data))
        except (*NESTED, KeyError, TypeError, AttributeError):  # not what vLLM sends
            self.readable = False

    def _take(self, event: Json) -> None:
        self._prompt = token_ids(event.get("prompt_token_ids")) or self._prompt
        for part in event.get("choices") or ():
            choice = self.choices.setdefault(part["index"], Choice())
            given = token_ids(part.get("prompt_token_ids"))
            choice.prompt = given or choice.prompt or self._prompt
            choice.tokens += token_ids(part.get("token_ids"))
            choice.finish = str(part.get("finish_reason") or choice.finish)
            self.ids = self.ids or bool(choice.tokens)


def token_ids(given: Any) -> list[int]:
    """A list of token ids of an answer; None is an empty one. Raises `ValueError` for others."""
    found = list(given or ())
    if not all(type(token) is int and 0 <= token <= LARGEST_ID for token in found):
        raise ValueError("not a list of token ids")
    return found


@dataclass(frozen=True)
class Passing:
    """A request that is passed on. body: as it is sent; sampled: what the client asked, if the
    answer is to be sampled."""

    body: bytes
    sampled: Json | None = None


class Relay:
    """The ASGI application. engine: its address, with or without /v1; domain: a request's domain
    from its header. Raises `UserError` for an address that is none."""

    def __init__(
        self, engine: str, samples: TrafficSamples, domain: Callable[[str | None], str]
    ) -> None:
        url = httpx.URL(engine)
        if url.scheme not in ("http", "https") or not url.host:
            raise UserError(
                "serve.engine must be the address of a running engine, such as "
                f"http://127.0.0.1:8001; given: '{engine}'."
            )
        self.base = str(url).rstrip("/").removesuffix("/v1")
        self.samples, self.domain = samples, domain
        self.client = httpx.AsyncClient(
            timeout=httpx.Timeout(None, connect=CONNECT_SECONDS),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
            trust_env=url.scheme == "https",
            # no cookie of one client for another: clients send their own
            cookies=CookieJar(DefaultCookiePolicy(allowed_domains=())),
        )
        self._log = QuietLog(logger)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Pass one request on and its answer back. Raises `ApiError` (502) if the engine does not
        answer or breaks off, and `ClientGoneError`."""
        passing = await self._passing(scope, receive)
        work = asyncio.create_task(self._pass(scope, passing, send))
        leaving = asyncio.create_task(_left(receive))
        try:
            await asyncio.wait((work, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise ClientGoneError("the client has left")
            work.result()
        finally:
            for task in (work, leaving):
                task.cancel()
            await asyncio.gather(work, leaving, return_exceptions=True)

    def refused(self, method: str, error: ApiError, client: str) -> None:
        """Note a request that was not passed on, or not answered."""
        if error.status != 499:
            self._log.note(f"refused with {error.status}", f"{error.kind}, client {client}")

    async def _passing(self, scope: Message, receive: Receive) -> Passing:
        body = (await receive())["body"]
        if scope["method"] != "POST" or scope["path"] not in SAMPLED or not self.samples.chosen():
            return Passing(body)
        allowed = dict(scope["headers"]).get(STORE_HEADER, b"true").strip().lower() == b"true"
        try:
            asked = json.loads(body)
        except NESTED:  # the engine says what is wrong with it
            return Passing(body)
        if not (isinstance(asked, dict) and allowed and asked.get("store") is not False):
            return Passing(body)
        if asked.get("echo"):  # token ids of the answer would begin with those of the prompt
            return Passing(body)
        return Passing(json.dumps({**asked, "return_token_ids": True}).encode(), asked)

    async def _pass(self, scope: Message, passing: Passing, send: Send) -> None:
        path, query = scope["raw_path"], scope["query_string"]
        if not path.startswith(b"/"):  # it must not become a part of the engine's address
            raise ApiError(400, "the request's target must be a path.", code="invalid_http")
        address = httpx.URL(self.base)
        target = address.raw_path.rstrip(b"/") + path + (b"?" + query if query else b"")
        url = address.copy_with(raw_path=target)
        headers = [
            (name, value)
            for name, value in scope["headers"]
            if name not in OWN_HEADERS and name not in REPLACED
        ]
        headers.append((b"accept-encoding", b"identity"))  # token ids are read from the answer
        request = self.client.build_request(
            scope["method"], url, headers=headers, content=passing.body
        )
        try:
            answer = await self.client.send(request, stream=True)
        except httpx.HTTPError as error:
            why = f"the engine at {self.base} does not answer ({type(error).__name__})"
            raise ApiError(502, f"{why}.", code="engine_unreachable") from error
        kind = answer.headers.get("content-type", "")
        reader = AnswerReader(kind.startswith("text/event-stream"))
        whole = False
        try:
            await self._answer(answer, reader if passing.sampled is not None else None, send)
            whole = True
        finally:  # a client that has its text may leave before the engine has closed the stream
            if passing.sampled is not None and answer.status_code == httpx.codes.OK:
                found = reader.end()
                if whole and not reader.ids:
                    why = "sampling needs vLLM 0.10.2 or newer (return_token_ids)"
                    self._log.note("an answer has no token ids", why)
                self._sample(scope, passing.sampled, found)
            await answer.aclose()

    async def _answer(
        self, answer: httpx.Response, reader: AnswerReader | None, send: Send
    ) -> None:
        """Send what the engine answers, and read it if it is sampled."""
        headers = [(n.lower(), v) for n, v in answer.headers.raw if n.lower() not in OWN_HEADERS]
        status = answer.status_code
        await send({"type": "http.response.start", "status": status, "headers": headers})
        try:
            async for part in answer.aiter_raw():
                if reader is not None:
                    reader.feed(part)
                await send({"type": "http.response.body", "body": part, "more_body": True})
        except httpx.HTTPError as error:
            self._log.note("an answer broke off", f"{self.base}, {type(error).__name__}")
            raise ApiError(502, "the engine has broken off its answer.") from error
        await send({"type": "http.response.body", "body": b""})

    def _sample(self, scope: Message, asked: Json, choices: Sequence[Choice]) -> None:
        """Keep the choices of an answer that have ended."""
        heat = asked.get("temperature")
        given = dict(scope["headers"]).get(DOMAIN_HEADER)
        domain = self.domain(given.decode("latin-1") if given else None)
        who = client_of(scope["client"][0])
        for one in choices:
            name = uuid.uuid4().hex
            own = (name, domain, who, one.prompt, one.tokens, ())
            temperature = float(heat) if isinstance(heat, (int, float)) else 1.0
            self.samples.add(SampledAnswer(*own, temperature, ENDED[one.finish]))


async def _left(receive: Receive) -> None:
    """Return once the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


def run_relay(
    relay: Relay,
    site: Site,
    listening: socket.socket,
    config: ServeConfig,
    started: Callable[[], None],
) -> None:
    """Relay until a signal ends it; open answers may then go on for `serve.grace_seconds`."""
    recorder = Recorder(None, relay.samples, None, config.learn_seconds)
    recorder.start()
    try:
        asyncio.run(_run(relay, site, listening, config.grace_seconds, started))
    finally:
        recorder.stop()


async def _run(
    relay: Relay, site: Site, listening: socket.socket, seconds: float, started: Callable[[], None]
) -> None:
    loop, ended, forced = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
    front = HttpServer(site, listening)

    def end() -> None:
        """The first signal lets open answers go on for a while, the second does not."""
        (forced if ended.is_set() else ended).set()

    def signalled() -> None:
        loop.call_soon_threadsafe(end)

    with ended_by_signals(signalled):
        front.start()
        started()
        await ended.wait()
        closing = asyncio.create_task(front.close(seconds))
        waiting = asyncio.create_task(forced.wait())
        await asyncio.wait((closing, waiting), return_when=asyncio.FIRST_COMPLETED)
        if not closing.done():
            front.end_all()
        await closing
        waiting.cancel()
    await relay.client.aclose()
