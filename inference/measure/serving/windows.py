"""Windows: some prompts of one group, answered at one concurrency between two reads of the server's
counters.

A window is measured as a whole or not at all. Its counts are discarded if a request fails, if a
counter falls (the server was restarted), or if the server counts more answers than were requested
(another client uses it). The window is then measured again, at most `bench.serving.retries` times.
A window with prompts that the server refuses as too long is measured again without them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from heads.api.errors import UserError
from inference.decoding.structured.constraint import Constraint
from inference.engines.client import (
    CHAT,
    LONGEST_WAIT,
    TEXT,
    Answer,
    Endpoint,
    ForbiddenError,
    OverlongError,
    PassingError,
    Served,
)
from inference.engines.counters import (
    Acceptance,
    EngineCounters,
    Look,
    ResetError,
    acceptance,
    identify,
    known_engines,
    of_response,
    read_look,
)
from inference.measure.prompts import Prompt
from inference.measure.serving.config import ServingConfig
from inference.measure.serving.structure import constraint_fields

logger = logging.getLogger(__name__)

SETTLE_SECONDS, POLL_SECONDS = 5.0, 0.02
"""How long counters may lag behind the answers, and how often they are read until then."""
RESPONSES, COUNTERS, CHUNKS, NOTHING = "responses", "counters", "chunks", "none"
"""Sources of acceptance."""


class OverlongWindowError(Exception):
    """A window with prompts that are too long for the server. places: theirs in the window."""

    def __init__(self, places: Sequence[int]) -> None:
        super().__init__(places)
        self.places = places


@dataclass(frozen=True)
class Group:
    """Prompts that are measured together: one domain, one range [first, end) of prompt tokens."""

    domain: str
    first: int
    end: int
    prompts: tuple[Prompt, ...]


@dataclass(frozen=True)
class Window:
    """One measured window: its place (the same prompts have the same place at every server), the
    answers in the order of its prompts, its total seconds, and its counts."""

    group: Group
    concurrency: int
    repeat: int
    number: int
    answers: list[Answer]
    seconds: float
    counted: Acceptance | None


@dataclass
class Side:
    """One server that is measured."""

    endpoint: Endpoint
    config: ServingConfig
    speculates: bool
    engine: EngineCounters | None = None
    source: str = NOTHING
    said: tuple[str, str] = ("", "")
    """The engine and its definition of acceptance, as in the responses."""
    repeated: int = 0
    restarts: int = 0
    windows: list[Window] = field(default_factory=list)

    async def connect(self) -> None:
        """Look for the model. Raises `UserError`."""
        await self.patiently("the list of models", self.endpoint.find_model, self.config.model)

    async def choose_source(self, answers: Sequence[Answer]) -> None:
        """Choose the source of acceptance, if the server speculates. answers: those of the warm-up.
        Raises `UserError` for a server without the source that `bench.serving.acceptance`
        requests."""
        if not self.speculates:
            return
        wanted, endpoint = self.config.acceptance, self.endpoint
        told = next(filter(None, (of_response(answer.last) for answer in answers)), None)
        if told is not None and wanted in ("auto", RESPONSES):
            self.source, self.said = RESPONSES, told[:2]
            return
        if wanted == RESPONSES:
            raise UserError(
                f"{endpoint.setting}: the responses of {endpoint.base} say nothing of speculation "
                "(vLLM: --per-request-spec-decode-metrics=detailed). Set "
                "bench.serving.acceptance=auto."
            )
        self.source = CHUNKS
        if wanted == CHUNKS:
            return
        try:
            samples = await self.patiently("the metrics", endpoint.look)
        except ForbiddenError as error:
            if wanted == COUNTERS or endpoint.metrics:
                raise
            logger.warning("%s tau is estimated from the times of streamed pieces", error)
            return
        if samples is None and wanted == COUNTERS:
            raise UserError(
                f"{endpoint.setting}: {endpoint.base} shows no metrics (SGLang: --enable-metrics; "
                "TensorRT-LLM: return_perf_metrics). Give their address as bench.serving.metrics, "
                "or set bench.serving.acceptance=chunks for an estimate."
            )
        if samples is None:
            return
        engine = identify(samples)
        if engine is None:
            raise UserError(
                f"{endpoint.setting}: the metrics of {endpoint.base} are of no known engine "
                f"({known_engines()}). Set bench.serving.acceptance=chunks for an estimate from "
                "the times of streamed pieces."
            )
        tokens = sum(answer.tokens for answer in answers)
        counted = acceptance(read_look(samples, engine), len(answers), tokens)
        if counted is None or (counted.passes and counted.drafted == 0):
            raise UserError(
                f"{endpoint.setting}: {endpoint.base} ({engine.name}) counts no drafts, so it "
                "serves without speculation. Start it with a drafter, or give it as "
                "bench.baseline_server beside one that has."
            )
        self.source, self.engine = COUNTERS, engine

    async def patiently(self, what: str, act: Any, *arguments: Any) -> Any:
        """Repeat an action that may fail for a while; raises `UserError` after the last attempt."""
        retries = self.config.retries
        for attempt in range(retries + 1):
            try:
                return await act(*arguments)
            except PassingError as error:
                if attempt == retries:
                    raise UserError(
                        f"{self.endpoint.setting}: {what} failed {retries + 1} times: {error}. Is "
                        "the server up, and used by nobody else?"
                    ) from error
                wait = min(LONGEST_WAIT, max(error.wait, self.config.backoff * 2**attempt))
                logger.warning("%s: %s; again in %g s", what, error, wait)
                await asyncio.sleep(wait)
                self.repeated += 1
        raise AssertionError("unreachable")

    async def measure(
        self,
        group: Group,
        bodies: Sequence[tuple[str, Mapping[str, Any]]],
        concurrency: int,
        repeat: int,
        number: int,
    ) -> None:
        """Measure a window and keep it; raises `OverlongWindowError`."""
        where = f"domain '{group.domain}', concurrency {concurrency}"
        given = (group, bodies, concurrency, repeat, number)
        self.windows.append(await self.patiently(where, self._window, *given))

    async def _window(
        self,
        group: Group,
        bodies: Sequence[tuple[str, Mapping[str, Any]]],
        concurrency: int,
        repeat: int,
        number: int,
    ) -> Window:
        before, limit = await self._look(), asyncio.Semaphore(concurrency)

        async def one(api: str, body: Mapping[str, Any]) -> Answer | None:
            async with limit:
                try:
                    return await self.endpoint.ask(api, body)
                except OverlongError:  # the others end, so that no counter is in between
                    return None

        begin = time.perf_counter()
        asked = [asyncio.create_task(one(*body)) for body in bodies]
        try:
            outcomes = await asyncio.gather(*asked)
        finally:
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
        seconds = time.perf_counter() - begin
        answers = [answer for answer in outcomes if answer is not None]
        counted = await self._counted(before, answers)
        if len(answers) < len(outcomes):
            raise OverlongWindowError([at for at, one in enumerate(outcomes) if one is None])
        return Window(group, concurrency, repeat, number, answers, seconds, counted)

    async def _look(self) -> Look | None:
        if self.engine is None:
            return None
        samples = await self.endpoint.look()
        if samples is None:
            raise PassingError(f"{self.endpoint.base} does not show its metrics any more")
        return read_look(samples, self.engine)

    async def _counted(self, before: Look | None, answers: Sequence[Answer]) -> Acceptance | None:
        """The counts since `before`, once the counters include all answers."""
        if before is None:
            return None
        deadline, last = time.monotonic() + SETTLE_SECONDS, before
        while True:
            now = await self._look()
            assert now is not None
            try:
                change = now.since(before)
            except ResetError as error:
                self.restarts += 1
                raise PassingError(
                    f"a counter of {self.endpoint.base} fell: the server was started again"
                ) from error
            ended = len(answers) if change.requests is None else round(change.requests)
            if ended >= len(answers) and now == last:
                break
            if time.monotonic() > deadline:
                break
            last = now
            await asyncio.sleep(POLL_SECONDS)
        if ended != len(answers):
            why = (
                "somebody else uses it"
                if ended > len(answers)
                else "these are metrics of one replica of several, of another server, or of one "
                "that was started again"
            )
            raise PassingError(
                f"{self.endpoint.base} counts {ended} answers where {len(answers)} were asked for: "
                f"{why}"
            )
        return acceptance(change, len(answers), sum(answer.tokens for answer in answers))


def api_of(config: ServingConfig, prompt: Prompt) -> str:
    """The endpoint for a prompt."""
    if config.api != "auto":
        return config.api
    return CHAT if prompt.messages is not None else TEXT


def body_of(
    config: ServingConfig,
    prompt: Prompt,
    settings: Mapping[str, Any],
    tokenizer: Any,
    constraint: Constraint | None,
    served: Served,
) -> tuple[str, dict[str, Any]]:
    """(endpoint, JSON of the request). tokenizer: renders messages for the completions endpoint;
    constraint: on the answer; served: the model, whose engine names the fields of a constraint.
    Raises `UserError` for token ids or a text at the chat endpoint, and for a constraint that the
    engine does not take."""
    api = api_of(config, prompt)
    body = dict(settings)
    if constraint is not None:
        body |= constraint_fields(constraint, api, served)
    if api == TEXT:
        content = list(prompt.render(tokenizer)) if prompt.text is None else prompt.text
        return api, {**body, "prompt": content}
    if prompt.messages is None:
        raise UserError(
            f"bench.serving.api=chat: prompt '{prompt.id}' is a text or token ids and no "
            "conversation. Set bench.serving.api=auto."
        )
    body["messages"] = [dict(message) for message in prompt.messages]
    if prompt.tools:
        body["tools"] = [dict(tool) for tool in prompt.tools]
    if prompt.arguments:
        body["chat_template_kwargs"] = dict(prompt.arguments)
    return api, body
