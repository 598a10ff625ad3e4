"""Windows: some prompts of one group, answered at one concurrency between two reads of the server's
counters.

A window is measured as a whole or not at all. Its counts are discarded if a request fails, if a
counter falls (the server was restarted), or if the server counts more answers than were requested
(another client uses it). The window is then measured again, at most `bench.serving.retries` times.
A window with prompts that the server refuses as too long is measured again without them.

A server may be another one after a failure. A restart is counted if the counters are lower than at
any look before, also between two windows; then, and after every failure, the server must still name
the same model. A server that speculates must go on to do so, one that is its baseline must not.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.samples import Sample

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
from inference.engines.models import described
from inference.measure.prompts import Prompt
from inference.measure.serving.config import ServingConfig
from inference.measure.serving.structure import constraint_fields

logger = logging.getLogger(__name__)

FEW = 3
"""Most retries of what waiting does not mend, such as an address at which no server is."""
SETTLE_SECONDS, POLL_SECONDS = 5.0, 0.02
"""How long counters may lag behind the answers, and how often they are read until then."""
RESPONSES, COUNTERS, CHUNKS, NOTHING = "responses", "counters", "chunks", "none"
"""Sources of acceptance."""


class MiscountError(PassingError):
    """What a server counts does not match its answers."""


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
    units of its prompts (`Prompt.unit`), the answers in their order, its total seconds, and its
    counts."""

    group: Group
    concurrency: int
    repeat: int
    number: int
    units: Sequence[str]
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
    """The names of its counters, from which restarts are seen, and acceptance if they are its
    source."""
    source: str = NOTHING
    said: tuple[str, str] = ("", "")
    """The engine and its definition of acceptance."""
    repeated: int = 0
    restarts: int = 0
    last: Look | None = None
    """The latest look at the counters."""
    doubtful: bool = False
    """Something failed, so the server may be another one by now."""
    windows: list[Window] = field(default_factory=list)

    async def connect(self) -> None:
        """Look for the model. Raises `UserError`."""
        await self.patiently("the list of models", self.endpoint.find_model, self.config.model)

    async def choose_source(self, answers: Sequence[Answer]) -> None:
        """Choose the source of acceptance, if the server speculates. answers: those of the warm-up.
        Raises `UserError` for a server without the source that `bench.serving.acceptance` requests,
        and for a baseline that speculates."""
        wanted, endpoint = self.config.acceptance, self.endpoint
        found = next(filter(None, (of_response(answer.last) for answer in answers)), None)
        if not self.speculates:
            self._require_plain(answers)
        elif found is not None and wanted in ("auto", RESPONSES):
            self.source, self.said = RESPONSES, found[:2]
        elif wanted == RESPONSES:
            raise UserError(
                f"{endpoint.setting}: the responses of {endpoint.base} say nothing of speculation "
                "(vLLM: --per-request-spec-decode-metrics=detailed). Set "
                "bench.serving.acceptance=auto."
            )
        elif wanted == CHUNKS:
            self.source = CHUNKS
        else:
            await self._choose_counters(answers)
        if self.engine is None and (samples := await self._samples()) is not None:
            self.engine = identify(samples)
        await self.patiently("the metrics", self._look)

    async def _choose_counters(self, answers: Sequence[Answer]) -> None:
        """Choose the server's counters as the source, or the times of pieces if it shows none."""
        wanted, endpoint = self.config.acceptance, self.endpoint
        self.source = CHUNKS
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
        self.source, self.engine, self.said = COUNTERS, engine, (engine.name, engine.definition)

    def resume(self, repeated: int, restarts: int, look: Look | None) -> None:
        """Go on after an interrupted measurement. repeated, restarts: its own; look: its last."""
        self.repeated += repeated
        self.restarts += restarts
        if self.last is not None and look is not None and _fell(self.last, look):
            self.restarts += 1

    async def patiently(self, what: str, act: Any, *arguments: Any, of_window: bool = False) -> Any:
        """Repeat an action that may fail for a while; raises `UserError` after the last attempt.
        of_window: failures count as repeated windows."""
        failures = hopeless = 0
        while True:
            try:
                return await act(*arguments)
            except PassingError as error:
                self.doubtful = True
                failures += 1
                hopeless += not self.endpoint.model or isinstance(error, MiscountError)
                if failures > self.config.retries or hopeless > FEW:
                    kept = " What was measured is kept: repeat the command to continue."
                    raise UserError(
                        f"{self.endpoint.setting}: {what} failed {failures} times: {error}. Is "
                        f"the server up, and used by nobody else?{kept if self.windows else ''}"
                    ) from error
                doubled = self.config.backoff * 2 ** min(failures - 1, 20)
                wait = min(LONGEST_WAIT, max(error.wait, doubled))
                logger.warning("%s: %s; again in %g s", what, error, wait)
                await asyncio.sleep(wait)
                self.repeated += of_window

    async def measure(
        self,
        group: Group,
        bodies: Sequence[tuple[str, Mapping[str, Any]]],
        concurrency: int,
        repeat: int,
        number: int,
        units: Sequence[str],
    ) -> None:
        """Measure a window and keep it; raises `OverlongWindowError`. units: of its prompts."""
        where = f"domain '{group.domain}', concurrency {concurrency}"
        given = (group, bodies, concurrency, repeat, number, units)
        self.windows.append(await self.patiently(where, self._window, *given, of_window=True))

    async def _window(
        self,
        group: Group,
        bodies: Sequence[tuple[str, Mapping[str, Any]]],
        concurrency: int,
        repeat: int,
        number: int,
        units: Sequence[str],
    ) -> Window:
        before, limit = await self._look(), asyncio.Semaphore(concurrency)
        if self.doubtful:
            await self._require_same_model()
            self.doubtful = False

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
        self._require_as_chosen(answers, counted)
        return Window(group, concurrency, repeat, number, units, answers, seconds, counted)

    async def _samples(self) -> list[Sample] | None:
        """The server's metrics. None if it has none or shows them to nobody; only a server whose
        counters are the source of acceptance must show them."""
        if self.source == COUNTERS:
            samples = await self.endpoint.look()
            if samples is None:
                raise PassingError(f"{self.endpoint.base} does not show its metrics any more")
            return samples
        try:
            return await self.endpoint.look()
        except (PassingError, UserError):
            return None

    async def _look(self) -> Look | None:
        """Look at the counters, and count a restart if one fell since the last look. Raises
        `UserError` for a baseline that drafts."""
        samples = await self._samples() if self.engine is not None else None
        if self.engine is None or samples is None:
            return None
        now = read_look(samples, self.engine)
        if not self.speculates:
            self._require_no_drafts(acceptance(now, 0, 0), "its counters")
        if self.last is not None and _fell(now, self.last):
            self.restarts += 1
            self.doubtful = True
        self.last = now
        return now

    async def _require_same_model(self) -> None:
        """Raise `UserError` if the server serves another model than before."""
        endpoint, before = self.endpoint, self.endpoint.served
        await endpoint.find_model(self.config.model)
        now = endpoint.served
        if (now.name, now.root) != (before.name, before.root):
            raise UserError(
                f"{endpoint.setting}: {endpoint.base} was started again with another model: "
                f"{described(now)}; before: {described(before)}. Serve the earlier one and "
                "repeat the command to continue, or measure this one under another measure.name."
            )

    def _require_as_chosen(self, answers: Sequence[Answer], counted: Acceptance | None) -> None:
        """Raise `MiscountError` if the source of acceptance tells nothing any more, and `UserError`
        if a baseline drafts."""
        if not self.speculates:
            self._require_plain(answers)
            return
        gone = (self.source == COUNTERS and counted is None) or (
            self.source == RESPONSES and not any(told(answer) for answer in answers)
        )
        if gone and any(answer.tokens > 1 for answer in answers):
            raise MiscountError(
                f"{self.endpoint.base} says nothing of drafts any more, as if it had been started "
                "again without speculation"
            )

    def _require_plain(self, answers: Sequence[Answer]) -> None:
        for answer in answers:
            found = of_response(answer.last)
            self._require_no_drafts(found[2] if found else None, "its responses")

    def _require_no_drafts(self, found: Acceptance | None, where: str) -> None:
        """Raise `UserError` for a baseline that drafts. where: what says so."""
        if found is not None and found.passes > 0 and (found.drafted or found.accepted):
            raise UserError(
                f"{self.endpoint.setting}: {self.endpoint.base} speculates too, as {where} say, "
                "so it shows no speedup. Give a server without a drafter, or none."
            )

    async def _counted(self, before: Look | None, answers: Sequence[Answer]) -> Acceptance | None:
        """The counts since `before`, once the counters include all answers."""
        if before is None or self.source != COUNTERS:
            return None
        deadline, last, restarts = time.monotonic() + SETTLE_SECONDS, before, self.restarts
        while True:
            now = await self._look()
            assert now is not None
            if self.restarts > restarts:
                raise PassingError(
                    f"a counter of {self.endpoint.base} fell: the server was started again"
                )
            change = now.since(before)
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
            raise MiscountError(
                f"{self.endpoint.base} counts {ended} answers where {len(answers)} were asked for: "
                f"{why}"
            )
        return acceptance(change, len(answers), sum(answer.tokens for answer in answers))


def _fell(now: Look, before: Look) -> bool:
    """Whether a counter is lower than before."""
    try:
        now.since(before)
    except ResetError:
        return True
    return False


def told(answer: Answer) -> Acceptance | None:
    """The acceptance that a response reports."""
    found = of_response(answer.last)
    if found is not None:
        return found[2]
    timings = answer.last.get("timings")
    if isinstance(timings, Mapping) and "predicted_n" in timings:
        # llama.cpp says nothing of drafts where an answer has none: every pass gave one token
        passes = max(0.0, float(timings["predicted_n"]) - 1)
        return Acceptance(passes, passes, 0.0, 0.0)
    return None


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
