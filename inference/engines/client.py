"""One OpenAI-compatible server: its model, its metrics, and streamed answers with the arrival times
of their pieces.

The key comes from an environment variable and does not appear in messages. `PassingError` is raised
for temporary errors (an error of the server, a broken connection, no answer in time), `UserError`
for permanent ones: `ForbiddenError` without a valid key, `OverlongError` for a prompt that does not
fit.
"""

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any
from urllib.parse import SplitResult, urlsplit, urlunsplit

import httpx
from prometheus_client.samples import Sample

from heads.api.errors import UserError, suggest
from inference.engines.counters import METRICS_PATHS
from inference.engines.scrape import read_samples

logger = logging.getLogger(__name__)

CHAT, TEXT = "chat", "completions"
PATHS = {CHAT: "/v1/chat/completions", TEXT: "/v1/completions"}
PASSING = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
BROKEN = 500
REFUSING = frozenset({400, 413, 422})
LONGEST_WAIT = 60.0
"""Most seconds between two attempts, also if a server asks for more."""
QUOTED = 300
"""Most characters of a server's message that an error quotes."""
OVERLONG = re.compile(
    r"context[ _-](length|size|window)|(maximum|max) (model|prompt|input|allowed) length"
    r"|max_(model|seq)_len|max_num_tokens|longer than the model",
    re.IGNORECASE,
)
"""How servers say that prompt and answer do not fit: ours and OpenAI (context_length_exceeded),
vLLM (maximum context length, maximum model length), SGLang (longer than the model's context length,
maximum allowed length), llama.cpp (exceed_context_size_error), TensorRT-LLM (max_seq_len)."""
PROBE = "Headstart probe: naïve 数学 — def f(x):\n    return x**2  # 12345 <b>&amp;</b>"
"""A text that tokenizers disagree on."""
TOGETHER = 0.002
"""Most seconds between two pieces of one verification: servers send them together."""
UNCLEAR = 0.15
"""Most gaps, as a share of the steps, that may lie between those within a step and the steps."""
Json = dict[str, Any]


def parts_of(address: str, setting: str) -> SplitResult:
    """The parts of a server's address. Raises `UserError` that names `setting` for an invalid
    one."""
    try:
        parts = urlsplit(address)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        httpx.URL(address)  # it refuses more than urlsplit
    except (ValueError, httpx.InvalidURL):
        usable = False
    if not usable:
        raise UserError(
            f"{setting} must be an address such as http://127.0.0.1:8000; given: '{address}'."
        )
    return parts


class PassingError(Exception):
    """A temporary error. wait: seconds that the server asked the client to wait."""

    def __init__(self, reason: str, wait: float = 0.0) -> None:
        super().__init__(reason)
        self.wait = wait


class ForbiddenError(UserError):
    """A server refuses the key, or the lack of one."""


class OverlongError(UserError):
    """A prompt that is too long for a server, together with its answer."""


@dataclass(frozen=True)
class Served:
    """A model that a server names. root: what it was loaded from; owner: the engine, as it calls
    itself; context: most tokens of a prompt with its answer. Empty and None: not said."""

    name: str
    root: str = ""
    owner: str = ""
    context: int | None = None


@dataclass
class Answer:
    """A streamed answer. Times are seconds of one monotonic clock; text: also that of its
    reasoning, if `reasoned`; arrivals: of the events with text; last: the fields of the response's
    events, which may include acceptance figures."""

    text: str = ""
    reasoned: bool = False
    tokens: int = 0
    prompt_tokens: int = 0
    begin: float = 0.0
    end: float = 0.0
    arrivals: list[float] = field(default_factory=list)
    last: Json = field(default_factory=dict)

    @property
    def first_token(self) -> float:
        """Seconds to the first text."""
        return (self.arrivals[0] if self.arrivals else self.end) - self.begin

    @property
    def decoding(self) -> float:
        """Seconds from the first text to the last."""
        return self.arrivals[-1] - self.arrivals[0] if self.arrivals else 0.0


class Endpoint:
    """A server at `address` (with or without /v1). setting: its name in messages; metrics: their
    address, if it is not one of the usual ones; advice: what to do if they cannot be read."""

    def __init__(
        self,
        address: str,
        setting: str,
        key_variable: str,
        timeout: float,
        metrics: str = "",
        advice: str = "",
    ) -> None:
        """Raises `UserError` for an invalid address."""
        parts = parts_of(address, setting)
        if parts.username or parts.password:
            raise UserError(
                f"{setting} has a password in it, which reports would show. Put a key "
                f"into the variable {key_variable} instead."
            )
        self.base = urlunsplit(parts).rstrip("/").removesuffix("/v1")
        if metrics:
            parts_of(self._url(metrics), "bench.serving.metrics")
        self.setting, self.key_variable, self.timeout = setting, key_variable, timeout
        self.metrics, self.advice = metrics, advice
        self.served = Served("")
        self._key = key = os.environ.get(key_variable, "")
        self.client = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {key}"} if key else None,
            timeout=timeout,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
            # The environment's proxies are for the internet, not for a cluster's servers.
            trust_env=parts.scheme == "https",
        )

    async def close(self) -> None:
        await self.client.aclose()

    @property
    def model(self) -> str:
        """The name of the model that is asked."""
        return self.served.name

    async def models(self) -> list[Served]:
        """The models that the server names. Raises `PassingError` if it does not answer."""
        content = await self._json("GET", "/v1/models")
        data = content.get("data")
        rows = data if isinstance(data, list) else []
        return [_served(row) for row in rows if isinstance(row, dict) and row.get("id")]

    async def find_model(self, wanted: str) -> None:
        """Find the served model. Raises `UserError` unless it is `wanted` or the only one, and
        `PassingError` if the server does not answer."""
        found = {one.name: one for one in await self.models()}
        names = list(found)
        if wanted and wanted in names:
            self.served = found[wanted]
        elif not wanted and len(names) == 1:
            self.served = found[names[0]]
        elif wanted:
            raise UserError(
                f"{self.setting}: the server at {self.base} does not serve '{wanted}' "
                f"(bench.serving.model).{suggest(wanted, names) if names else ' It names none.'}"
            )
        else:
            raise UserError(
                f"{self.setting}: the server at {self.base} serves "
                f"{', '.join(sorted(names)[:20]) or 'no model that it names'}. Name one with "
                "bench.serving.model."
            )

    async def look(self) -> list[Sample] | None:
        """The server's metrics; None if it has none. Raises `UserError` if they are not in
        Prometheus' text format, `ForbiddenError` if it shows them to nobody without a key."""
        named = [self.metrics] if self.metrics else [self.base + path for path in METRICS_PATHS]
        unreadable, forbidden = "", None
        for place in named:
            answer = await self._request("GET", place)
            if answer.status_code in (404, 405):
                continue
            try:
                self._check(answer)
            except ForbiddenError as error:
                forbidden = error
                continue
            if answer.text.lstrip()[:1] in ("[", "{", "<"):
                unreadable = f"{place} shows something else than Prometheus' text format"
                continue
            try:
                return list(read_samples(answer.text))
            except ValueError as error:
                unreadable = f"{place}, {error}"
        if forbidden is not None:
            raise forbidden
        if unreadable or self.metrics:
            wrong = unreadable or f"there is nothing at {self.metrics}"
            raise UserError(f"{self.setting}: {wrong}. {self.advice}".rstrip())
        return None

    async def count_tokens(self, body: Json) -> int | None:
        """Tokens of a prompt by the server's /tokenize; None if it has no such route. Raises
        `OverlongError` if it says that there are too many, `PassingError`."""
        answer = await self._tokenize({"model": self.model, **body})
        if not answer.is_success:
            if answer.status_code in REFUSING and OVERLONG.search(answer.text):
                self._check(answer)
            return None
        try:
            found = answer.json()
            # llama.cpp expects the text as `content`, and finds no tokens without it
            return int(found.get("count") or len(found["tokens"])) or None
        except (ValueError, KeyError, TypeError, AttributeError):
            return None

    async def require_tokenizer(self, tokenizer: Any, advice: str) -> None:
        """Raise `UserError` if the server's /tokenize reads `PROBE` differently than `tokenizer`,
        `PassingError` if it cannot be asked now; servers without such a route pass. advice: what to
        do."""
        mine = list(tokenizer.encode(PROBE, add_special_tokens=False))
        theirs = await self._probed()
        if theirs is not None and theirs != mine:
            raise UserError(
                f"{self.setting}: the server at {self.base} has another tokenizer: it reads "
                f"'{PROBE[:15]}...' as {theirs[:8]}..., the one here as {mine[:8]}...; {advice}."
            )

    async def _probed(self) -> list[int] | None:
        """The server's token ids of `PROBE`; None if it does not say."""
        named = {"model": self.model} if self.model else {}
        for body in (
            {**named, "prompt": PROBE, "add_special_tokens": False},
            {"content": PROBE, "add_special": False},  # llama.cpp
        ):
            answer = await self._tokenize(body)
            try:
                found = answer.json()["tokens"] if answer.is_success else None
            except (ValueError, KeyError, TypeError):
                continue
            if isinstance(found, list) and found and all(type(one) is int for one in found):
                return found
        return None

    async def _tokenize(self, body: Json) -> httpx.Response:
        """What the server's /tokenize answers. Raises `PassingError` for a server that is busy or
        starts; a route that is broken is as good as none."""
        answer = await self._request("POST", "/tokenize", body)
        if answer.status_code == BROKEN:
            logger.warning("%s: %s answers with status 500: not used", self.setting, answer.url)
        elif answer.status_code in PASSING:
            self._check(answer)
        return answer

    async def ask(self, api: str, body: Mapping[str, object]) -> Answer:
        """Stream one answer; raises `PassingError`, `UserError`."""
        sent = {
            "model": self.model,
            **body,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        answer = Answer(begin=time.perf_counter())
        pieces: list[str] = []
        ended = False
        try:
            async with self.client.stream("POST", self.base + PATHS[api], json=sent) as response:
                if not response.is_success:
                    await response.aread()
                    self._check(response)
                async for line in lines_of(response):
                    data = line.removeprefix("data:").strip()
                    if not line.startswith("data:") or not data:
                        continue
                    if data == "[DONE]":
                        ended = True
                        break
                    self._take(answer, pieces, data)
        except httpx.HTTPError as error:
            raise PassingError(self._words(error)) from error
        answer.end = time.perf_counter()
        answer.text = "".join(pieces)
        if not ended:
            raise PassingError(f"{self.base} ended a stream in the middle of an answer")
        if not answer.tokens:
            raise UserError(
                f"{self.setting}: {self.base} does not say how many tokens an answer has "
                "(stream_options.include_usage), so nothing can be measured."
            )
        return answer

    def _take(self, answer: Answer, pieces: list[str], data: str) -> None:
        """Add an event to an answer."""
        try:
            event = json.loads(data)
        except ValueError as error:  # a broken connection cuts it off
            raise PassingError(f"{self.base} sent an event that is no JSON ({error})") from error
        if not isinstance(event, dict):
            raise PassingError(f"{self.base} sent an event that is no JSON object")
        if event.get("error"):
            said = self._quote(event["error"])
            if not pieces and OVERLONG.search(json.dumps(event["error"])):
                raise OverlongError(f"{self.setting}: {self.base} refuses a prompt ({said}).")
            raise PassingError(f"{self.base} failed in the middle of an answer: {said}")
        try:
            self._add(answer, pieces, event)
        except (TypeError, ValueError, AttributeError, OverflowError) as error:
            raise UserError(
                f"{self.setting}: {self.base} streams an event that is not as in OpenAI's API "
                f"({error}): {self._quote(data)}. Give a server with that API."
            ) from error

    def _add(self, answer: Answer, pieces: list[str], event: Json) -> None:
        """Add an event's text and usage to an answer. Raises the error of whatever has another
        type than in OpenAI's API."""
        answer.last |= {name: value for name, value in event.items() if value is not None}
        for choice in event.get("choices") or []:
            if choice.get("finish_reason") == "abort":  # paused, put to sleep or shut down
                raise PassingError(f"{self.base} aborted an answer")
            delta = choice.get("delta") or {}
            text = _text_of(choice.get("text") or delta.get("content"))
            thought = _text_of(delta.get("reasoning_content") or delta.get("reasoning"))
            answer.reasoned |= bool(thought)
            text += thought
            if text:
                pieces.append(text)
                answer.arrivals.append(time.perf_counter())
        usage = event.get("usage") or {}
        answer.tokens = int(usage.get("completion_tokens") or answer.tokens)
        answer.prompt_tokens = int(usage.get("prompt_tokens") or answer.prompt_tokens)

    async def _request(self, method: str, place: str, body: Json | None = None) -> httpx.Response:
        try:
            return await self.client.request(method, self._url(place), json=body)
        except httpx.HTTPError as error:
            raise PassingError(self._words(error)) from error

    def _url(self, place: str) -> str:
        """The address of a place: itself if it is one, otherwise its path on this server."""
        return place if "://" in place else self.base + place

    async def _json(self, method: str, place: str) -> Json:
        answer = await self._request(method, place)
        self._check(answer)
        try:
            content = answer.json()
        except ValueError as error:
            raise UserError(f"{self.setting}: {self.base}{place} is no JSON: {error}.") from error
        if not isinstance(content, dict):
            raise UserError(f"{self.setting}: {self.base}{place} is no JSON object.")
        return content

    def _check(self, answer: httpx.Response) -> None:
        """Raise `PassingError` or `UserError` for an error status."""
        status, said = answer.status_code, self._quote(answer.text)
        if answer.is_success:
            return
        if status in (401, 403):
            raise ForbiddenError(
                f"{self.setting}: the server at {self.base} wants a valid key (status {status}). "
                f"Put it into the environment variable {self.key_variable}."
            )
        reason = f"{answer.url} answers with status {status}{f' ({said})' if said else ''}"
        if status in PASSING:
            wait = asked_wait(answer.headers.get("Retry-After", ""))
            raise PassingError(reason, wait or 0.0)
        overlong = status in REFUSING and OVERLONG.search(answer.text)
        raise (OverlongError if overlong else UserError)(f"{self.setting}: {reason}.")

    def _words(self, error: httpx.HTTPError) -> str:
        if isinstance(error, httpx.TimeoutException):
            return f"{self.base} sent nothing for {self.timeout:g} seconds"
        return f"{self.base}: {type(error).__name__} {error}".strip()

    def _quote(self, said: object) -> str:
        """A server's message on one line, without the key, which some servers repeat."""
        text = said if isinstance(said, str) else json.dumps(said)
        text = text.replace(self._key, "***") if self._key else text
        return " ".join(text.split())[:QUOTED]


def asked_wait(retry_after: str) -> float | None:
    """The seconds in a header `Retry-After`, at most `LONGEST_WAIT`; None if it has none."""
    seconds = retry_after.strip()
    return min(LONGEST_WAIT, float(seconds)) if seconds.replace(".", "", 1).isdecimal() else None


def _served(row: Json) -> Served:
    """A model's entry in /v1/models."""
    context = row.get("max_model_len")
    known = type(context) is int and context > 0
    name, root, owner = (str(row.get(key) or "") for key in ("id", "root", "owned_by"))
    return Served(name, root, owner, context if known else None)


async def lines_of(response: httpx.Response) -> AsyncIterator[str]:
    """The lines of a stream of server-sent events. httpx's own lines also end at separators of
    Unicode, which an answer may contain."""
    rest = ""
    async for part in response.aiter_text():
        *lines, rest = (rest + part).split("\n")
        for line in lines:
            yield line.removesuffix("\r")
    if rest:
        yield rest


def _text_of(content: Any) -> str:
    """The text of a piece: a text, or a list of parts, some of which have one. Raises `TypeError`
    for anything else."""
    if isinstance(content, list):
        return "".join(_text_of(part.get("text")) for part in content)
    if content is not None and not isinstance(content, str):
        raise TypeError(f"a text is a {type(content).__name__}")
    return content or ""


def steps_of(arrivals: Sequence[float]) -> int:
    """The number of verifications behind the events of a stream: events that arrived together count
    as one. 0 if it cannot be told.

    The usual time of a step is the median of the gaps above `TOGETHER`, which few delays do not
    change. Events belong together if the time between them is less than `TOGETHER`, and less than a
    quarter of the usual time. It cannot be told if all events arrived together, or if many gaps lie
    between those and half of the usual time, so that any limit among them would be arbitrary.
    """
    gaps = [after - before for before, after in pairwise(arrivals)]
    if not gaps:
        return len(arrivals)
    apart = [gap for gap in gaps if gap >= TOGETHER]
    if not apart:
        return 0
    usual = median(apart)
    limit = min(TOGETHER, usual / 4)
    steps = 1 + sum(gap >= limit for gap in gaps)
    unclear = sum(limit <= gap < usual / 2 for gap in gaps)
    return steps if unclear <= UNCLEAR * steps else 0
