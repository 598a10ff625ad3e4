"""The layer between the routes and the worker: admission, tokenising prompts, delivering events,
and shutting down."""

from __future__ import annotations

import asyncio
import copy
import importlib.metadata
import inspect
import logging
import math
import secrets
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from heads.api.errors import UserError
from inference.decoding.engine import Engine
from inference.decoding.logprobs import Logprobs
from inference.decoding.requests import Request
from inference.decoding.rules.names import sampling_rule
from inference.server.config import ServeConfig
from inference.server.drafter_folder import DrafterFolder
from inference.server.errors import ApiError
from inference.server.front.fair import Place, Places
from inference.server.front.quiet import QuietLog
from inference.server.front.secret import Secret
from inference.server.front.workers import FairWorkers, work_in_turn
from inference.server.metrics import ServerMetrics
from inference.server.protocol import CHAT, LARGEST_SEED, Asked
from inference.server.recorder import FLUSH_SECONDS, Recorder
from inference.server.samples import TrafficSamples
from inference.server.scheduler import Done, Event, Failed, Piece, Scheduler, ServedRequest, Started
from inference.server.swap_metrics import SwapMetrics
from inference.server.swapping import DrafterSwaps
from inference.server.token_text import TokenTexts
from inference.target.chat import render_prompt
from inference.verifications import VerificationLog, record_facts

logger = logging.getLogger(__name__)
Made = TypeVar("Made")
LARGEST_DEFAULT_CONTEXT = 4096
SHORT_PROMPT = 16384
"""Most characters of a prompt that is tokenised in a few milliseconds. Longer prompts have a
separate thread, where they wait only for each other."""
OUTCOMES = {
    401: "unauthorized",
    429: "overloaded",
    499: "cancelled",
    500: "error",
    503: "unavailable",
    504: "timeout",
}
"""A request's outcome by the status of its error; invalid for all other statuses."""


class Ticket:
    """An answer under way, one of the choices of a request: its job, its place, and its events.
    gone: the client has left."""

    def __init__(self, job: ServedRequest, service: Service, place: Place) -> None:
        self.job, self.service, self.place = job, service, place
        self.gone = False
        self.ended = False
        self._events: asyncio.Queue[Event | None] = asyncio.Queue()
        self._deadline = job.created + service.config.request_seconds
        job.deliver = self._events.put_nowait
        place.displace = self._displace

    def _displace(self) -> bool:
        if not self.job.placed:
            self.job.deliver(Failed(self.service.displaced()))
        return not self.job.placed

    def leave(self) -> None:
        self.gone = True
        self._events.put_nowait(None)

    async def start(self) -> None:
        """Wait until the prompt was read; raises `ApiError` (429 if it takes longer than
        `serve.queue_seconds`)."""
        event = await self._next(self.job.created + self.service.config.queue_seconds, self._late)
        assert isinstance(event, Started)
        self.place.displace = None

    def _late(self) -> ApiError:
        wait = f"within {self.service.config.queue_seconds:g} s"
        if self.job.placed:
            return self.service.overloaded(f"the prompt has a row, but was not read {wait}")
        return self.service.overloaded(f"no row became free {wait}")

    async def next(self) -> Piece | Done:
        """The next event after `start`; raises `ApiError`."""
        message = f"the answer took longer than {self.service.config.request_seconds:g} s."
        event = await self._next(self._deadline, lambda: ApiError(504, message, code="timeout"))
        assert isinstance(event, (Piece, Done))
        if self.job.asked.limit == 0:  # only the prompt was requested: drop the prefill's token
            event = _without_text(event)
        if isinstance(event, Done):
            self.ended = True
            self.service.metrics.requests.labels(event.finish).inc()
        return event

    async def _next(self, deadline: float, late: Callable[[], ApiError]) -> Event:
        """The next event; raises `ApiError`: `late` at the deadline, or the job's error."""
        event = None
        try:
            async with asyncio.timeout(max(0.0, min(deadline, self._deadline) - time.monotonic())):
                event = await self._events.get()
        except TimeoutError:
            if not self.gone:
                raise late() from None
        if event is None:
            raise ApiError(499, "the client has left.")
        if isinstance(event, Failed):
            raise event.error
        return event

    def close(self) -> None:
        """Free the row and give back the place, after success or failure."""
        if not self.ended:
            self.ended = True
            self.service.scheduler.cancel(self.job)
        self.place.leave()
        self.service.open.discard(self)


def installed_version() -> str:
    """Headstart's version; "unknown" if it is not installed as a package."""
    try:
        return importlib.metadata.version("headstart")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


class Service:
    """One server: its engine, limits and metrics. Call all methods except `post` on the event
    loop's thread."""

    def __init__(
        self,
        config: ServeConfig,
        engine: Engine,
        drafter: str,
        secret: Secret | None,
        records: Path | None = None,
        weights: str = "",
        admin: Secret | None = None,
        checkpoint: str = "",
        samples: Path | None = None,
    ) -> None:
        """drafter, weights: the drafter's name and the hash of its weights, for the records. admin:
        the admin token; None: the drafter cannot be changed over HTTP. checkpoint: the drafter's
        folder, if it has one. samples: folder of a learner's samples."""
        self.config, self.engine, self.secret = config, engine, secret
        info, decode = engine.target.info, engine.decode
        folder = Path(info.id)
        self.name = config.name or (folder.resolve().name if folder.is_dir() else info.id)
        self.names = tuple(dict.fromkeys((self.name, info.id)))
        self.created = int(time.time())
        largest = config.context or LARGEST_DEFAULT_CONTEXT
        self.context = min(largest, info.max_position_embeddings)
        drafts = engine.drafter is not None
        self.metrics = ServerMetrics(engine.tree.max_depth, engine.clock, drafts)
        self.metrics.info.labels(self.name, drafter, decode.shape, installed_version()).set(1)
        self.metrics.rows.set(decode.batch_size)
        rule = sampling_rule(decode.rule, decode.shape)  # of requests above temperature 0
        facts = record_facts(engine, drafter, weights, rule)
        log, sampled = None, None
        if records is not None:
            size, redact = int(config.records_megabytes * 1e6), config.records_redact
            log = VerificationLog(records, facts, size, redact)
        if samples is not None:
            size = int(config.learn_megabytes * 1e6)
            sampled = TrafficSamples(samples, facts, size, config.learn_share)
        self.recorder = None
        if log or sampled:
            seconds = config.learn_seconds if sampled else FLUSH_SECONDS
            self.recorder = Recorder(log, sampled, self.metrics, seconds)
        self.loop: asyncio.AbstractEventLoop | None = None
        self.draining = False
        self.on_broken: Callable[[], None] = lambda: None
        kept = (log, sampled)
        self.scheduler = Scheduler(
            engine, self.context, self.metrics, self.post, *kept, self._broken
        )
        self.admin, self.samples = admin, samples
        shown = SwapMetrics(self.metrics.registry)
        self.swaps = DrafterSwaps(engine, self.scheduler, checkpoint or drafter, shown)
        self.watched: DrafterFolder | None = None
        if config.watch_folder:
            self.watched = DrafterFolder(self.swaps, Path(config.watch_folder).expanduser())
        self.open: set[Ticket] = set()
        self.places = Places(decode.batch_size + config.queue)
        self._log = QuietLog(logger)
        # one copy for each thread that uses it
        self._tokenizer = copy.deepcopy(engine.target.tokenizer)
        self._other_tokenizer = copy.deepcopy(engine.target.tokenizer)
        self.texts = TokenTexts(copy.deepcopy(engine.target.tokenizer))
        """For the event loop's thread."""
        self.longest_prompt = self.context * max(map(len, self._tokenizer.get_vocab()))
        """Most characters that can fit into the context."""
        # arguments of rendering itself: a request must not set its own template, or change the kind
        # of output
        known = inspect.signature(self._tokenizer.apply_chat_template).parameters
        self._reserved = {"messages", "add_generation_prompt", *known}
        self._short = FairWorkers(1, "headstart-prompts")
        self._long = FairWorkers(1, "headstart-long-prompts")

    def start(self) -> None:
        """Start the worker; raises `UserError` if its buffers cannot be allocated."""
        self.scheduler.start()
        if self.recorder is not None:
            self.recorder.start()
        if self.watched is not None:
            self.watched.start()

    def stop(self) -> None:
        """End the worker and write the buffered records."""
        self.scheduler.stop()
        if self.watched is not None:
            self.watched.stop()
        if self.recorder is not None:
            self.recorder.stop()
        self._short.stop()
        self._long.stop()

    # Admission

    @property
    def ready(self) -> bool:
        """Whether the server accepts requests."""
        return self.scheduler.healthy and not self.draining

    def overloaded(self, why: str) -> ApiError:
        """Status 429, with an estimate of when a place will be free: the mean age of the open
        requests, at least a second."""
        now = time.monotonic()
        ages = [now - ticket.job.created for ticket in self.open]
        wait = math.ceil(min(max(sum(ages) / len(ages) if ages else 1.0, 1.0), 60.0))
        message = f"the server is busy: {why}. Ask again later."
        return ApiError(429, message, code="overloaded", retry_after=wait)

    def displaced(self) -> ApiError:
        """Status 429 for a request whose place went to a client with fewer requests."""
        return self.overloaded("other clients wait as well, and this address has the most requests")

    def enter(self, client: str) -> Place:
        """A place for a client's request, which the caller must give back; raises `ApiError`."""
        self._require_ready()
        place = self.places.take(client)
        if place is None:
            raise self.overloaded(f"{len(self.places)} requests run or wait")
        return place

    def _require_ready(self) -> None:
        if not self.ready:
            message = "the server takes no requests now: it is stopping."
            raise ApiError(503, message, code="unavailable", retry_after=5)

    async def tickets(
        self, asked: Asked, domain: str, created: float, place: Place
    ) -> list[Ticket]:
        """Make a job for each choice of a request, `asked.choices` per prompt, and queue them at
        the worker; raises `ApiError`. Each job has a place; the first one has `place`."""
        places = [place, *self._further_places(asked, place.client)]
        try:
            prompts = [await self.tokens(asked, one, created, place) for one in asked.prompts]
            if asked.constraint is not None or self.engine.constraint is not None:
                late = "the structure of the answer was not compiled"
                await self._in_turn(self._long, partial(self._compile, asked), created, place, late)
            self._require_ready()  # again, as tokenising the prompts takes time
            limits = [self._limit(asked, prompt) for prompt in prompts]
        except BaseException:
            for other in places[1:]:
                other.leave()
            raise
        name = f"{'chatcmpl' if asked.kind == CHAT else 'cmpl'}-{secrets.token_hex(12)}"
        tickets: list[Ticket] = []
        most = asked.logprobs
        for prompt, limit in zip(prompts, limits, strict=True):
            seed = secrets.randbits(63) if asked.seed is None else asked.seed
            for number in range(asked.choices):
                own = len(tickets)
                job = ServedRequest(
                    id=f"{name}-{own}" if own else name,
                    prompt=prompt,
                    limit=limit,
                    seed=(seed + number) % (LARGEST_SEED + 1),
                    asked=asked,
                    domain=self.config.domain(domain),
                    created=created,
                    client=place.client,
                    logprobs=None if most is None else Logprobs(most, asked.echo),
                )
                tickets.append(Ticket(job, self, places[own]))
        for ticket in tickets:
            self.open.add(ticket)
            self.scheduler.submit(ticket.job)
        return tickets

    def _further_places(self, asked: Asked, client: str) -> list[Place]:
        """Places for all choices except the first; raises `ApiError`."""
        count, places = len(asked.prompts) * asked.choices, list[Place]()
        if count > self.places.most:
            name = "n" if asked.choices > 1 else "prompt"
            raise ApiError(
                400,
                f"the request asks for {count} answers; this server takes {self.places.most} at "
                "once. Ask in several requests.",
                name,
            )
        try:
            while len(places) < count - 1:
                places.append(self.enter(client))
        except ApiError:
            for place in places:
                place.leave()
            raise
        return places

    async def tokens(
        self, asked: Asked, prompt: Any, created: float, place: Place
    ) -> tuple[int, ...]:
        """The token ids of one of a request's prompts; raises `ApiError`. Long prompts are
        tokenised one at a time; clients take turns."""
        if isinstance(prompt, tuple):
            return prompt
        size = characters(prompt) + characters(asked.template)
        if size > self.longest_prompt:
            raise ApiError(
                400,
                f"the prompt has {size} characters; {self.longest_prompt} are the most here "
                f"({self.context} positions of the longest token). Shorten it.",
                "prompt",
                "context_length_exceeded",
            )
        lane, tokenizer = self._short, self._tokenizer
        weight = characters(prompt, names=True) + characters(asked.template, names=True)
        if weight > SHORT_PROMPT:
            lane, tokenizer = self._long, self._other_tokenizer
        work = partial(self._tokens, asked, prompt, tokenizer)
        what = f"the prompt, of {size} characters,"
        return await self._in_turn(lane, work, created, place, f"{what} was not tokenised")

    async def _in_turn(
        self, lane: FairWorkers, work: Callable[[], Made], created: float, place: Place, late: str
    ) -> Made:
        """The result of `work`, which runs on a thread when it is the client's turn; raises
        `ApiError`. late: the message if it does not happen within `serve.queue_seconds`."""
        seconds = self.config.queue_seconds
        try:
            async with asyncio.timeout(max(0.0, created + seconds - time.monotonic())):
                return await work_in_turn(lane, place, work, self.displaced)
        except TimeoutError as error:
            raise self.overloaded(f"{late} within {seconds:g} s") from error
        except asyncio.CancelledError:
            self._require_ready()  # if it waited when the server stopped
            raise

    def _compile(self, asked: Asked) -> None:
        """Compile the constraint of an answer before the worker needs it; raises `ApiError`."""
        own = "ignore_eos" if asked.ignore_eos else "min_tokens"
        name, constraint = asked.constraint or (own, None)
        given = (None, asked.ignore_eos, constraint, asked.min_tokens)
        try:
            self.engine.constrained(Request(0, (0,), 0, 1, *given))
        except UserError as error:
            raise ApiError(400, f"'{name}': {error}", name) from error

    def require_tokens(self, tokens: tuple[int, ...], name: str) -> None:
        """Raise `ApiError` for invalid token ids. name: the parameter that has them."""
        vocab = self.engine.target.info.vocab_size
        if tokens and (min(tokens) < 0 or max(tokens) >= vocab):
            message = f"token ids go from 0 to {vocab - 1}; the {name} has others."
            raise ApiError(400, message, name)

    def _limit(self, asked: Asked, prompt: tuple[int, ...]) -> int:
        """The most new tokens of an answer to `prompt`; raises `ApiError` if there is no room for
        them."""
        if not prompt:
            raise ApiError(400, "the prompt is empty.", "prompt")
        self.require_tokens(prompt, "prompt")
        room = self.context - len(prompt)
        limit = min(self.engine.decode.max_new_tokens, room)
        if asked.limit is not None:
            limit = max(asked.limit, 1)
        if room < 1 or limit > room:
            given = limit if asked.limit is None else asked.limit
            spare = "" if given else "; a prompt alone takes one position more"
            raise ApiError(
                400,
                f"this server has {self.context} positions per request; the prompt takes "
                f"{len(prompt)} and 'max_tokens' is {given}. Shorten one of them{spare}.",
                "max_tokens" if room >= 1 else "prompt",
                "context_length_exceeded",
            )
        if asked.min_tokens > limit:
            message = f"'min_tokens' is {asked.min_tokens}, more than the {limit} of 'max_tokens'."
            raise ApiError(400, message, "min_tokens")
        return limit

    def _tokens(self, asked: Asked, prompt: Any, tokenizer: Any) -> tuple[int, ...]:
        reserved = sorted(set(asked.template) & self._reserved)
        if reserved:
            message = f"'{reserved[0]}' is no value for a template."
            raise ApiError(400, message, "chat_template_kwargs")
        try:
            if asked.kind == CHAT:
                given = dict(asked.template)
                return tuple(render_prompt(tokenizer, prompt, arguments=given, empty=True))
            prompt.encode("utf-8")  # JSON can hold half a surrogate pair, which is not valid text
            return tuple(tokenizer.encode(prompt, add_special_tokens=asked.special))
        except UserError as error:
            raise ApiError(400, str(error), "messages") from error
        except UnicodeEncodeError as error:
            message = "the prompt is not valid text (a lone surrogate)."
            raise ApiError(400, message, "prompt") from error
        # the template fails on the given values
        except (TypeError, ValueError) as error:
            message = f"the chat template fails on this conversation ({type(error).__name__})."
            raise ApiError(400, message, "messages") from error

    def refused(self, method: str, error: ApiError, client: str) -> None:
        """Note a request that ended with an error: count it if it is a POST or its headers were not
        read, and log it unless its client has left."""
        if method in ("POST", ""):
            self.metrics.requests.labels(OUTCOMES.get(error.status, "invalid")).inc()
        if error.status != 499:
            self._log.note(f"refused with {error.status}", f"{error.kind}, client {client}")

    # From the worker

    def post(self, events: list[tuple[ServedRequest, Event]]) -> None:
        """Pass a step's events from the worker's thread to the loop's."""
        if self.loop is not None and not self.loop.is_closed():
            self.loop.call_soon_threadsafe(_deliver, events)

    def _broken(self) -> None:
        logger.error("the engine has failed for good; the server ends")
        self.on_broken()

    # Shutting down

    async def drain(self) -> None:
        """Accept nothing new, let running requests end for `serve.grace_seconds`, then cancel the
        rest."""
        self.draining = True
        await self._wait_until_empty(self.config.grace_seconds)
        for ticket in list(self.open):
            self.scheduler.cancel(ticket.job)
            ticket.job.deliver(Failed(ApiError(503, "the server has stopped.", code="unavailable")))
        await self._wait_until_empty(2.0)

    async def _wait_until_empty(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while self.open and time.monotonic() < end:
            await asyncio.sleep(0.02)

    def facts(self) -> dict[str, str | int]:
        """The model's entry in /v1/models."""
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "headstart",
            "root": self.engine.target.info.id,
            "max_model_len": self.context,
        }


def _without_text(event: Piece | Done) -> Piece | Done:
    """The event for an answer without tokens."""
    if isinstance(event, Piece):
        return Piece("")
    return Done("", "length", (), event.drafts)


def characters(value: object, names: bool = False) -> int:
    """Characters of all texts in a JSON value. names: also count the members' names, and one
    character for every other value, which a template may turn into text."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        own = sum(len(name) for name in value) if names else 0
        return own + sum(characters(item, names) for item in value.values())
    if isinstance(value, list):
        return sum(characters(item, names) for item in value)
    return int(names)


def _deliver(events: list[tuple[ServedRequest, Event]]) -> None:
    for job, event in events:
        job.deliver(event)
