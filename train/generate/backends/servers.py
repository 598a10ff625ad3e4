"""Sampling through serving engines over HTTP: several servers, many requests at once, retries.

After a temporary error (429, 5xx, a broken connection, an aborted answer, none in time) the request
is put back, any server may take it next, and the server that failed gets no requests for a while. A
server that keeps failing is left out. If none is left, or one request has failed too often, the run
ends with an error and keeps the answers so far; the same command continues. If a server refuses a
request (400, 413, 422), that row has failed.

A server that failed may have been started again with another model. Before its next request it is
checked as at the start, and must name the same model as then. Whether that is the target, its names
only suggest: a server may call the target, or a copy of it, by any name. So other names are a
warning.
"""

from __future__ import annotations

import logging
import os
import queue
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import httpx

from heads.api.errors import UserError
from heads.api.reading import read_json, require_fit
from inference.decoding.requests import Completion, Request
from inference.engines.client import LONGEST_WAIT, PASSING, PROBE, REFUSING, Served, asked_wait
from inference.engines.models import described, may_be_same, same_model
from inference.manifest import write_json
from inference.target.loading import TargetConfig
from train.data.answers import SERVED
from train.features.servers import FailureError, pause_after
from train.generate.backends import protocols
from train.generate.backends.protocols import BadAnswerError, Json, OpenAI, Protocol, SGLang
from train.generate.sampling import SamplingConfig
from train.generate.states import ASKED, StatesKeeper
from train.generate.target_facts import TargetFacts
from train.generate.turns import Refused

logger = logging.getLogger(__name__)

BUSY = frozenset({429, 503})
TOO_MANY = 429
"""A busy status of a server that is still running."""
KEPT = "What was answered is kept; the same command continues."
LOOKING_SECONDS = 0.05
"""How long a thread waits while another one checks its server, before it sees whether it may go
on."""
ABORTED = "abort"
"""How answers end at a server that is paused, put to sleep or shut down (vLLM, SGLang)."""


class ServerError(Exception):
    """A request without an answer. status: of HTTP; 0: none. wait: seconds the server asked for."""

    def __init__(self, reason: str, status: int = 0, wait: float | None = None) -> None:
        super().__init__(reason)
        self.status, self.wait = status, wait
        self.passing, self.busy = status == 0 or status in PASSING, status in BUSY


def _unusable(address: str, error: Exception, kept: str = "") -> UserError:
    """The sentence about a server. error: begins with it; kept: what else to say."""
    reason = str(error).removesuffix(".")
    return UserError(f"the server at {address} cannot be used: {reason}. {kept}".rstrip())


@dataclass
class Server:
    """One server: its address, its protocol, the model that it named at the start, and its recent
    errors."""

    address: str
    protocol: Protocol
    served: Served
    doubtful: bool = False
    """It is checked before its next request."""
    looking: threading.Lock = field(default_factory=threading.Lock)
    """Held by the thread that checks it."""
    failures: int = 0
    """Consecutive errors; of requests that were in flight together only one counts."""
    refusals: int = 0
    """Consecutive answers that it is overloaded, counted in the same way."""
    failed_at: float = 0.0
    """Monotonic time of the last error that counted."""
    resume_at: float = 0.0
    """Monotonic time before which nothing is sent."""
    lock: threading.Lock = field(default_factory=threading.Lock)


@dataclass
class Pending:
    """A request without an answer, and how often a server failed to answer it."""

    request: Request
    attempts: int = 0


Outcome = Completion | Refused | Exception
"""An exception ends the run."""


class ServerPool:
    """Samples answers with all given servers. Construct once: it checks every server first."""

    def __init__(
        self,
        sampling: SamplingConfig,
        target: TargetFacts,
        config: TargetConfig | None = None,
        out: Path | None = None,
    ) -> None:
        """config: the target's, for `sampling.states`; out: the responses' folder. Raises
        `UserError` for a server without answer, token ids or the target's tokenizer, and for one
        that serves another model than those that gave the responses in `out`."""
        self.sampling, self.target = sampling, target
        self._stop = threading.Event()
        self.keeper: StatesKeeper | None = None
        if sampling.states:
            assert config is not None
            assert out is not None
            given = (sampling, target.info, config, out)
            self.keeper = StatesKeeper(*given, lambda: self._stop.is_set())
        key = os.environ.get(sampling.key_variable)
        self.client = httpx.Client(
            headers={"Authorization": f"Bearer {key}"} if key else None,
            timeout=sampling.timeout,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
            follow_redirects=True,
            # The environment's proxies are for the internet, not for a cluster's servers.
            trust_env=False,
            verify=ssl.create_default_context(),
        )
        self.servers = [self._connect(address) for address in sampling.servers]
        if out is not None:
            self._require_earlier_models(out)
        self._answered = time.monotonic()

    def sample(self, requests: Iterable[Request]) -> Iterator[Completion | Refused]:
        """Answers in finishing order. Raises `UserError` if the servers cannot continue."""
        self._answered = time.monotonic()
        waiting: queue.SimpleQueue[Pending] = queue.SimpleQueue()
        outcomes: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        for request in requests:
            waiting.put(Pending(request))
        total, stop = waiting.qsize(), threading.Event()
        self._stop = stop
        for server in filter(self._usable, self.servers):
            for _ in range(min(self.sampling.concurrency, total)):
                given = (server, waiting, outcomes, stop)
                threading.Thread(target=self._work, args=given, daemon=True).start()
        try:
            for _ in range(total):
                outcome = outcomes.get()
                if isinstance(outcome, Exception):
                    raise outcome
                yield outcome
        finally:
            stop.set()
            for server in self.servers:
                server.doubtful = True  # until the next call, nobody sees it fail
            if self.keeper is not None:
                self.keeper.close()

    def _usable(self, server: Server) -> bool:
        return server.failures <= self.sampling.retries

    def _work(
        self,
        server: Server,
        waiting: queue.SimpleQueue[Pending],
        outcomes: queue.SimpleQueue[Outcome],
        stop: threading.Event,
    ) -> None:
        """Send one request after the other to one server; several threads do this for each."""
        while not stop.is_set() and self._usable(server):
            try:
                pending = waiting.get(timeout=0.1)
            except queue.Empty:
                continue
            pause = server.resume_at - time.monotonic()
            if server.looking.locked():
                pause = max(pause, LOOKING_SECONDS)
            if pause > 0:
                waiting.put(pending)
                stop.wait(min(pause, 0.5))
                continue
            outcome: Outcome | None
            try:
                outcome = self._outcome(server, pending)
            except Exception as error:  # noqa: BLE001 - the caller waits for it, and raises it
                outcome = error
            if outcome is None:
                waiting.put(pending)
            else:
                outcomes.put(outcome)
                if isinstance(outcome, Exception):
                    stop.set()

    def _outcome(self, server: Server, pending: Pending) -> Outcome | None:
        """The outcome of a request; None: send it again. A `UserError` ends the run."""
        begun = time.monotonic()
        try:
            if server.doubtful and not self._look_again(server):
                return None
            found = self._answer(server, pending.request)
        except ServerError as error:
            if error.passing:
                return self._failed(server, pending, error, begun)
            if error.status in REFUSING:
                return Refused(pending.request, str(error))
            return UserError(f"the server at {server.address} answers with {error}. {KEPT}")
        except (UserError, BadAnswerError) as error:
            return _unusable(server.address, error, KEPT)
        server.failures = server.refusals = 0
        self._answered = time.monotonic()
        return found

    def _failed(
        self, server: Server, pending: Pending, error: ServerError, begun: float
    ) -> UserError | None:
        """Hold the server back for a while, or give up. begun: when the request was sent."""
        with server.lock:
            now = time.monotonic()
            if begun >= server.failed_at:  # the others were in flight when it failed before
                # A busy server is not broken: the run waits for it as long as `patience` allows.
                server.refusals += error.busy
                server.failures += not error.busy
                server.failed_at = now
            server.doubtful |= error.status != TOO_MANY
            row = max(1, server.refusals if error.busy else server.failures)
            wait = self._backoff(row - 1) if error.wait is None else error.wait
            server.resume_at = max(server.resume_at, now + wait)
        if not self._usable(server):
            logger.warning("the server at %s is left out: %s", server.address, error)
        pending.attempts += not error.busy
        if not any(map(self._usable, self.servers)):
            what = "no server is left"
        elif time.monotonic() - self._answered > self.sampling.patience:
            what = f"no server has answered for {self.sampling.patience:g} seconds"
        # A broken server may have had the request several times before it is left out.
        elif pending.attempts >= (self.sampling.retries + 1) * len(self.servers):
            what = f"a request failed {pending.attempts} times"
        else:
            return None
        return UserError(f"{what}: {server.address}: {error}. {KEPT}")

    def _backoff(self, attempts: int) -> float:
        return pause_after(attempts, self.sampling.backoff, LONGEST_WAIT)

    def _answer(self, server: Server, request: Request) -> Completion:
        body = server.protocol.request(request, self.sampling)
        if self.keeper is not None:
            body |= ASKED
        answer = self._ask(server.address + server.protocol.path, body)
        tokens, ended = server.protocol.answer(answer, request)
        if ended.finish == ABORTED:
            raise ServerError("it aborted the answer")
        facts = self.target
        completion = protocols.completion_of(
            request, tokens, ended, facts.eos_token_ids, facts.info.vocab_size
        )
        if self.keeper is not None:
            try:
                self.keeper.keep(answer, completion)
            except FailureError as error:
                raise ServerError(str(error)) from error
        return completion

    def _connect(self, address: str) -> Server:
        """The server at an address, after checking its protocol, its model and its tokenizer."""
        server = Server(address, *self._protocol(address))
        self._warn_of_other_names(server)
        try:
            self._probe(server, self._patiently)
        except (ServerError, BadAnswerError, UserError) as error:
            raise _unusable(address, error) from error
        return server

    def _require_earlier_models(self, out: Path) -> None:
        """Compare the named models with those that gave the responses in `out`, and note them."""
        path = out / SERVED
        known: list[Served] = []
        if path.is_file() and any(path.parent.glob("*.parquet")):  # otherwise nobody has answered
            earlier = require_fit(list[dict[str, str]], read_json(path), f"'{path}'")
            known = [Served(each.get("name", ""), each.get("root", "")) for each in earlier]
        named = [one for one in self.servers if one.served.name or one.served.root]
        for server in named if known else []:
            if not any(may_be_same(server.served, one) for one in known):
                raise UserError(
                    f"the server at {server.address} serves {described(server.served)}; the "
                    f"responses in '{out}' so far are those of {described(known[0])}. Serve that "
                    "model, or generate all of them again with run.overwrite=true."
                )
        found = dict.fromkeys((each.name, each.root) for each in known)
        found |= dict.fromkeys((server.served.name, server.served.root) for server in named)
        if found:
            write_json(path, [{"name": name, "root": root} for name, root in found])

    def _warn_of_other_names(self, server: Server) -> None:
        target, served = self.target.info.id, server.served
        if (served.name or served.root) and not same_model(served, target):
            logger.warning(
                "the server at %s serves %s, but the target is '%s', as whose answers its own are "
                "stored. If that is not the target by another name, or a copy of it, serve the "
                "target, or set target.path to what is served",
                *(server.address, described(served), target),
            )

    def _look_again(self, server: Server) -> bool:
        """Check a server that may have been started again; False: another thread is doing it.
        Raises `UserError` for another model than at the start, `ServerError` if it does not
        answer."""
        if not server.looking.acquire(blocking=False):
            return False
        try:
            if server.doubtful:
                now, before = self._named(server.address, server.protocol, self._ask), server.served
                if now != before:
                    raise UserError(
                        f"it was started again with another model: {described(now)}; "
                        f"before: {described(before)}. Serve the earlier one."
                    )
                self._probe(server, self._ask)
                server.doubtful = False
        finally:
            server.looking.release()
        return True

    def _probe(self, server: Server, ask: Callable[[str, Json], Json]) -> None:
        """Raise `UserError` or `BadAnswerError` for a server that returns no token ids, has another
        tokenizer than the target, or leaves states that are not the target's."""
        protocol, keeper = server.protocol, self.keeper
        body = protocol.probe(PROBE) | (ASKED if keeper is not None else {})
        try:
            answer = ask(server.address + protocol.path, body)
        except ServerError as error:
            if error.passing:
                raise
            raise UserError(f"it refuses the probe: {error}") from error
        theirs, ended = protocol.read_probe(answer)
        tokenizer = self.target.tokenizer
        mine = tokenizer.encode(PROBE, add_special_tokens=protocol.adds_special_tokens)
        protocols.same_tokenizer("it", mine, theirs)
        if keeper is not None:
            if ended.finish == ABORTED:
                raise ServerError("it aborted the probe")
            try:
                keeper.check(answer, theirs)
            except FailureError as error:
                raise ServerError(str(error)) from error

    def _named(self, address: str, protocol: Protocol, ask: Callable[[str], Json]) -> Served:
        """The model that a server names; without name and root if it does not say."""
        try:
            return protocol.served(ask(address + protocol.models))
        except ServerError as error:
            if error.passing:
                raise
            return Served("")

    def _protocol(self, address: str) -> tuple[Protocol, Served]:
        """The protocol of a server, and the model that it names."""
        if self.sampling.protocol == "sglang":
            return (sglang := SGLang()), self._named(address, sglang, self._patiently)
        try:
            listed = self._patiently(address + OpenAI.models)
        except ServerError as error:
            raise UserError(
                f"{address} is neither a vLLM nor an SGLang server: /v1/models gives {error}. "
                "Check sampling.server."
            ) from error
        if self.sampling.protocol == "auto":
            with suppress(ServerError):
                sglang = SGLang()
                return sglang, sglang.served(self._ask(address + sglang.models))
        names = [one.name for one in protocols.served_in(listed)]
        wanted = self.sampling.served_model
        if (wanted and wanted not in names) or (not wanted and len(names) != 1):
            raise UserError(
                f"the server at {address} serves {', '.join(names) or 'nothing'}; "
                f"sampling.served_model is '{wanted}'. Name one of them."
            )
        protocol = OpenAI(wanted or names[0])
        return protocol, protocol.served(listed)

    def _patiently(self, url: str, body: Json | None = None) -> Json:
        """Ask, repeatedly after temporary errors; raises `UserError` after the last attempt."""
        for attempt in count():
            try:
                return self._ask(url, body)
            except ServerError as error:
                if not error.passing:
                    raise
                if attempt == self.sampling.retries:
                    raise UserError(f"{url} does not answer: {error}. Is the server up?") from error
                time.sleep(self._backoff(attempt) if error.wait is None else error.wait)
        raise AssertionError("unreachable")

    def _ask(self, url: str, body: Json | None = None) -> Json:
        """POST JSON, or GET without a body; raises `ServerError`, `UserError` for a wrong key."""
        method = "GET" if body is None else "POST"
        # states of any request, also of the probe, are files that must be found again
        keeper = None if body is None else self.keeper
        headers = None if keeper is None else {"X-Request-Id": keeper.request_id()}
        try:
            answer = self.client.request(method, url, json=body, headers=headers)
            content = answer.json() if answer.is_success else None
        # half an answer: ValueError
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            raise ServerError(f"{type(error).__name__}: {error}") from error
        if isinstance(content, dict):
            return content
        if answer.is_success:
            raise ServerError("the answer is no JSON object")
        status, text = answer.status_code, answer.text[:400].strip()
        reason = f"status {status}" + (f" ({text})" if text else "")
        if status in (401, 403):
            variable = self.sampling.key_variable
            raise UserError(f"it wants a valid key; put it into the variable {variable}: {reason}")
        raise ServerError(reason, status, asked_wait(answer.headers.get("Retry-After", "")))
