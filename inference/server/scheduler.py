"""The worker: one thread that owns the engine, takes requests from a queue, decodes them together
and returns text.

The event loop's thread only puts jobs and cancellations into the inbox. The results of a step for
all rows go back in one call, so that a step wakes the loop once, independent of the number of rows.
The worker also detokenizes: a stop string ends its row at the step in which it appears.

If a step fails, the requests under way fail, and the worker starts a new session. After
`MOST_FAILURES` failures in a row it gives up.
"""

from __future__ import annotations

import copy
import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from heads.api.errors import UserError
from inference.decoding.engine import Engine
from inference.decoding.logprobs import Logprobs, TokenLogprobs
from inference.decoding.requests import DEAD_END, Completion, PassRecord, Request
from inference.decoding.session import Session
from inference.server.errors import ApiError
from inference.server.front.fair import FairQueue
from inference.server.metrics import ServerMetrics
from inference.server.protocol import Asked
from inference.server.samples import SampledAnswer, TrafficSamples
from inference.server.text import StopText
from inference.server.trial import TrialCounts
from inference.verifications import VerificationLog

logger = logging.getLogger(__name__)
MOST_FAILURES = 3
CALL_SECONDS = 1.0
"""Interval at which a caller that waits for the worker checks that it is alive."""


@dataclass(frozen=True)
class Started:
    """The prompt was read and the first token picked."""


@dataclass(frozen=True)
class Piece:
    """More text of a streamed answer. tokens: the answer's tokens so far; logprobs: of the tokens
    that were in no earlier piece, if requested."""

    text: str
    tokens: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass
class Drafts:
    """Verifications of an answer, the tokens that they committed, and the drafted ones of these."""

    passes: int = 0
    committed: int = 0
    accepted: int = 0


@dataclass(frozen=True)
class Done:
    """An answer's end. text: the whole text; finish: stop or length; tokens: all generated tokens,
    end of text or stop included; logprobs: as in `Piece`."""

    text: str
    finish: str
    tokens: tuple[int, ...]
    drafts: Drafts
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True)
class Failed:
    """No answer, and why."""

    error: ApiError


Event = Started | Piece | Done | Failed


@dataclass
class ServedRequest:
    """A request for the worker. deliver: takes events on the event loop's thread; created:
    monotonic seconds of its arrival; first: of its first token; client: the client that it counts
    for.

    logprobs: the requested log-probabilities, filled in by the decoder. The worker sets the number
    (index) and the remaining fields. placed: it has a row; sampled: its passes are kept for the
    learner; told: tokens whose log-probabilities were delivered.
    """

    id: str
    prompt: tuple[int, ...]
    limit: int
    seed: int
    asked: Asked
    domain: str
    created: float
    client: str = ""
    logprobs: Logprobs | None = None
    deliver: Callable[[Event], None] = lambda event: None
    index: int = -1
    placed: bool = False
    text: StopText | None = None
    tokens: list[int] = field(default_factory=list)
    shown: list[str] = field(default_factory=list)
    drafts: Drafts = field(default_factory=Drafts)
    first: float = 0.0
    sampled: bool = False
    passes: list[PassRecord] = field(default_factory=list)
    told: int = 0

    def untold(self, tokens: int) -> tuple[TokenLogprobs, ...]:
        """Those log-probabilities of the first `tokens` tokens that were not delivered yet."""
        if self.logprobs is None:
            return ()
        begin, self.told = self.told, tokens
        return tuple(self.logprobs.answer[begin:tokens])


Post = Callable[[list[tuple[ServedRequest, Event]]], None]
Work = Callable[[Session], list[Completion]]


@dataclass(frozen=True)
class Task:
    """Work for the worker between two steps. work: returns the completions that ended meanwhile."""

    work: Work
    done: Future[None] = field(default_factory=Future)


class Scheduler:
    """See the module. post: called on the worker's thread with the events of a step; broken: called
    there when the worker gives up."""

    def __init__(
        self,
        engine: Engine,
        context: int,
        metrics: ServerMetrics,
        post: Post,
        log: VerificationLog | None,
        samples: TrafficSamples | None,
        broken: Callable[[], None],
    ) -> None:
        self.engine, self.context, self.metrics = engine, context, metrics
        self.log, self.samples = log, samples
        self.post, self.broken = post, broken
        # a copy, as the event loop uses the target's at the same time, and a tokenizer may be used
        # by only one thread at a time
        self.tokenizer = copy.deepcopy(engine.target.tokenizer)
        self.healthy = False
        self.trial: TrialCounts | None = None
        """Counts the verifications of two drafters; changed only on the worker's thread."""
        self.step_failed: Callable[[], None] = lambda: None
        """Called on the worker's thread after a failed step, before a new session starts."""
        self._inbox: queue.SimpleQueue[tuple[str, ServedRequest | Task | None]]
        self._inbox = queue.SimpleQueue()
        self._live: dict[int, ServedRequest] = {}
        self._waiting: FairQueue[Request] = FairQueue()
        self._out: list[tuple[ServedRequest, Event]] = []
        self._session: Session | None = None
        self._count = 0
        self._succeeded = False
        """Whether the last step has ended an answer."""
        self._ended = False
        self._ready = threading.Event()
        self._refusal: UserError | None = None
        self._thread = threading.Thread(target=self._work, name="headstart-engine", daemon=True)

    # Called from the event loop's thread

    def start(self) -> None:
        """Start the worker and wait until its buffers are allocated; raises `UserError` if that
        fails."""
        self._thread.start()
        self._ready.wait()
        if self._refusal is not None:
            raise self._refusal

    def submit(self, job: ServedRequest) -> None:
        """Queue a job; its events follow."""
        self._inbox.put(("add", job))

    def cancel(self, job: ServedRequest) -> None:
        """Stop a job; it delivers no further events. A job that has ended is ignored."""
        self._inbox.put(("cancel", job))

    def call(self, work: Work) -> None:
        """Let the worker run `work` between two steps, and wait for it. Raises what `work` raises,
        and `UserError` if there is no worker. Call it from any thread except the worker's."""
        task = Task(work)
        self._inbox.put(("call", task))
        while True:
            try:
                return task.done.result(CALL_SECONDS)
            except TimeoutError:
                if not self._thread.is_alive() and not task.done.done():
                    raise UserError("the server is stopping, so nothing is changed.") from None

    def stop(self) -> None:
        """End the worker; jobs under way fail."""
        self._inbox.put(("stop", None))
        self._thread.join(10.0)

    # The worker's thread

    def _work(self) -> None:
        failures, begun = 0, False
        session: Session | None
        details = self.log is not None or self.samples is not None
        while not self._ended and failures < MOST_FAILURES:
            try:
                with Session(
                    self.engine, self.context, self._on_tokens, details=details
                ) as session:
                    self._session, self.healthy, begun = session, True, True
                    self._ready.set()
                    while not self._ended:
                        if self._turn(session):
                            failures = 0
            except UserError as error:
                self._refusal = error
                failures = MOST_FAILURES
                logger.error("the engine refuses to serve: %s", error)
            except Exception:
                # no exception of a model, a driver or a kernel may leave clients waiting
                failures += 1
                logger.exception("a step failed (%d of %d in a row)", failures, MOST_FAILURES)
                self.step_failed()
            finally:
                session = self._session = None  # the next one needs its memory
                # before a client learns of the failure and tries again
                self.healthy = failures < MOST_FAILURES
                broken = "the engine failed; the request can be repeated"
                self._fail_all(broken if failures else "the server is stopping")
        self.healthy = False
        self._ready.set()
        if begun and not self._ended:  # otherwise `start` raises the reason
            self._drain_inbox()
            self.broken()

    def _turn(self, session: Session) -> bool:
        """Read the inbox, run a step, and post its results; returns whether a request ended
        successfully."""
        self._take(session)
        if self._ended:
            return False
        self._succeeded = False
        for completion in session.step():
            self._complete(completion)
        self._send(session.running)
        return self._succeeded

    def _send(self, running: int) -> None:
        """Post the events, and update the numbers of running and waiting requests."""
        if self._out:
            out, self._out = self._out, []
            self.post(out)
        self.metrics.running.set(running)
        self.metrics.waiting.set(max(0, len(self._live) - running))

    def _take(self, session: Session) -> None:
        """Process everything in the inbox; wait for an entry if there is nothing to decode or to
        send. Then assign free rows to clients in turn."""
        while True:
            try:
                idle = not (session.unfinished or len(self._waiting) or self._out)
                order, job = self._inbox.get(block=idle)
            except queue.Empty:
                break
            if job is None:
                self._ended = True
                return
            if isinstance(job, Task):
                self._do(session, job)
            elif order == "add":
                self._admit(session, job)
            elif self._live.pop(job.index, None) is not None:
                session.cancel(job.index)
                self._record(job, "cancelled")
        free = session.free
        while free and len(self._waiting):
            request = self._waiting.get()
            if job := self._live.get(request.index):  # not cancelled meanwhile
                session.add(request)
                job.placed = True
                free -= 1

    def _do(self, session: Session, task: Task) -> None:
        """Run a task; its exception is raised where the task is awaited."""
        try:
            for completion in task.work(session):
                self._complete(completion)
        except Exception as error:  # noqa: BLE001 - raised where the task is waited for
            task.done.set_exception(error)
        else:
            task.done.set_result(None)

    def _admit(self, session: Session, job: ServedRequest) -> None:
        job.index = self._count
        self._count += 1
        try:
            asked = job.asked
            follows = None if asked.constraint is None else asked.constraint[1]
            own = (asked.sampling, asked.ignore_eos, follows, asked.min_tokens, job.logprobs)
            request = Request(job.index, job.prompt, job.seed, job.limit, *own)
            session.check(request)
        except UserError as error:
            self._out.append((job, Failed(ApiError(400, str(error)))))
            return
        if asked.stream or asked.stops:
            ends = self.engine.target.eos_token_ids
            job.text = StopText(self.tokenizer, ends, asked.stops, asked.min_tokens)
        job.sampled = self.samples is not None and asked.store and self.samples.chosen()
        self._live[job.index] = job
        self._waiting.put(job.client, request)

    def _on_tokens(self, request: Request, tokens: list[int], record: PassRecord | None) -> None:
        job = self._live.get(request.index)
        if job is None:
            return  # cancelled, or ended by a stop string: the row runs until the next step
        if record is None:
            job.first = time.monotonic()
            self.metrics.first.observe(job.first - job.created)
            self.metrics.prompt_tokens.labels(job.domain).inc(len(job.prompt))
            self._out.append((job, Started()))
        else:
            self._book(job, record)
        job.tokens += tokens
        if job.text is None:
            return
        self._show(job, job.text.add(tokens))
        if job.text.stopped:
            assert self._session is not None
            self._session.cancel(request.index)
            self._end(job, "stop")

    def _show(self, job: ServedRequest, piece: str) -> None:
        """Add text to the answer; a streaming client gets it at once."""
        if piece:
            job.shown.append(piece)
            if job.asked.stream:
                assert job.text is not None
                tokens = job.text.tokens
                self._out.append((job, Piece(piece, tokens, job.untold(tokens))))

    def _book(self, job: ServedRequest, record: PassRecord) -> None:
        """Count a verification, before its tokens are added."""
        job.drafts.passes += 1
        job.drafts.committed += record.committed
        job.drafts.accepted += record.accepted
        self.metrics.verified(job.domain, record)
        if self.trial is not None:
            self.trial.count(job.index, job.domain, record, job.client)
        if job.sampled:
            job.passes.append(record)
        if self.log is not None and job.asked.store:
            root, heat = len(job.prompt) + len(job.tokens) - 1, job.asked.sampling.temperature
            self.log.verification(job.id, root, job.domain, record, heat)

    def _complete(self, completion: Completion) -> None:
        job = self._live.get(completion.request.index)
        if job is None or completion.finish == "cancelled":
            return
        if completion.finish == DEAD_END:
            del self._live[job.index]
            why = "the grammar of this request allows no further token of this model"
            self._out.append((job, Failed(ApiError(400, f"{why}, not even end of text."))))
            self._record(job, "cancelled")
            return
        self._end(job, completion.finish)

    def _end(self, job: ServedRequest, finish: str) -> None:
        """Complete an answer: deliver its end and count it."""
        self._succeeded = True
        tokens = len(job.tokens)
        del self._live[job.index]
        if job.text is not None:
            self._show(job, job.text.rest())
            if job.text.stopped:
                finish, tokens = "stop", job.text.tokens
            whole = "".join(job.shown)
        else:
            ends = self.engine.target.eos_token_ids
            shown = [token for token in job.tokens if token not in ends]
            whole = str(self.tokenizer.decode(shown, skip_special_tokens=True))
        given = tuple(job.tokens[:tokens])
        self._out.append((job, Done(whole, finish, given, job.drafts, job.untold(tokens))))
        now = time.monotonic()
        self.metrics.tokens.labels(job.domain).inc(tokens)
        self.metrics.whole.observe(now - job.created)
        if tokens > 1:
            self.metrics.per_token.observe((now - job.first) / (tokens - 1))
        self._record(job, finish)

    def _record(self, job: ServedRequest, finish: str) -> None:
        """Record the sequence of a request that has ended."""
        heat = job.asked.sampling.temperature
        if self.trial is not None:
            self.trial.ended(job.index, job.domain, job.client)
        if self.log is not None and job.tokens and job.asked.store:
            self.log.sequence(job.id, job.domain, job.prompt, job.tokens, job.seed, heat, finish)
        if self.samples is not None and job.sampled and job.passes and finish != "cancelled":
            own = (job.id, job.domain, job.client, job.prompt, tuple(job.tokens), job.passes)
            self.samples.add(SampledAnswer(*own, heat, finish))

    # After a failure or a stop

    def _fail_all(self, why: str) -> None:
        """Fail every job under way."""
        status = 503 if self._ended else 500
        self._out += [(job, Failed(ApiError(status, why))) for job in self._live.values()]
        self._live.clear()
        self._waiting.clear()
        self._send(0)

    def _drain_inbox(self) -> None:
        """Refuse the jobs left in the inbox, which is not read after that."""
        error = ApiError(503, "the engine has failed; the server is going down")
        while True:
            try:
                order, job = self._inbox.get(timeout=0.2)
            except queue.Empty:
                return
            if order == "add" and isinstance(job, ServedRequest):
                self.post([(job, Failed(error))])
