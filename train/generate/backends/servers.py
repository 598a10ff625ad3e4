"""Sampling through serving engines over HTTP: several servers, many requests at once, errors that pass waited out.

An error that may pass (429, 5xx, a broken connection, no answer in time) puts the request back; any server may take it next. 429
and 503 also hold back the server's other requests. A server that keeps failing is left out; when none is left, or one request has
failed too often, the run ends with a clear error, keeping what was answered: the same command continues. A request that a server
refuses (400, 413, 422) is that row's failure.
"""

from __future__ import annotations

import http.client
import json
import logging
import os
import queue
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from heads.api.errors import UserError
from inference.decoding.requests import Completion, Request
from train.generate.backends.protocols import (
    PROBE,
    BadAnswerError,
    OpenAI,
    Protocol,
    SGLang,
    completion_of,
    same_tokenizer,
)
from train.generate.sampling import SamplingConfig
from train.generate.target_facts import TargetFacts
from train.generate.turns import Refused

logger = logging.getLogger(__name__)

LONGEST_WAIT = 60.0
PASSING = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
BUSY = frozenset({429, 503})
REFUSING = frozenset({400, 413, 422})
LARGEST_ANSWER = 1 << 28
# Servers are reached directly: a proxy of the environment stands between here and the internet, not between here and a cluster.
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class PassingError(Exception):
    """An error that may pass; `wait`: seconds that the server asked for, busy: it has too much to do."""

    def __init__(self, reason: str, wait: float | None = None, busy: bool = False) -> None:
        super().__init__(reason)
        self.wait, self.busy = wait, busy


class RefusedError(Exception):
    """The server will not answer this request, ever. status: of HTTP."""

    def __init__(self, reason: str, status: int) -> None:
        super().__init__(reason)
        self.status = status


@dataclass
class Server:
    """One server: its address, what it speaks, and how it is doing."""

    address: str
    protocol: Protocol
    failures: int = 0
    """Errors in a row; of requests that were under way together only one counts."""
    failed_at: float = 0.0
    """Monotonic time of the last error that counted."""
    held_back: int = 0
    """Answers in a row that it has too much to do."""
    resume_at: float = 0.0
    """Monotonic time before which nothing is sent."""
    lock: threading.Lock = field(default_factory=threading.Lock)


@dataclass(order=True)
class Job:
    """A request on its way: not before `at`, tried `attempts` times so far."""

    at: float
    number: int
    request: Request = field(compare=False)
    attempts: int = field(default=0, compare=False)


class ServerPool:
    """Samples answers with all given servers. Construct once: it checks every server first."""

    def __init__(self, sampling: SamplingConfig, target: TargetFacts) -> None:
        """Raises `UserError` for a server that does not answer, returns no token ids or has another tokenizer."""
        self.sampling, self.target = sampling, target
        self.servers = [self._connect(address) for address in sampling.servers]
        self._answered = time.monotonic()

    def sample(self, requests: Iterable[Request]) -> Iterator[Completion | Refused]:
        """Answers in finishing order. Raises `UserError` when the servers cannot go on."""
        self._answered = time.monotonic()
        jobs: queue.PriorityQueue[Job] = queue.PriorityQueue()
        count = 0
        for count, request in enumerate(requests, 1):
            jobs.put(Job(0.0, count, request))
        results: queue.Queue[Completion | Refused | BaseException] = queue.Queue()
        stop = threading.Event()
        alive = [server for server in self.servers if server.failures <= self.sampling.retries]
        per_server = min(self.sampling.concurrency, max(1, count))
        threads = [
            threading.Thread(target=self._work, args=(server, jobs, results, stop), daemon=True)
            for server in alive
            for _ in range(per_server)
        ]
        for thread in threads:
            thread.start()
        try:
            for _ in range(count):
                outcome = results.get()
                if isinstance(outcome, BaseException):
                    raise outcome
                yield outcome
        finally:
            stop.set()

    def _work(
        self,
        server: Server,
        jobs: queue.PriorityQueue[Job],
        results: queue.Queue[Completion | Refused | BaseException],
        stop: threading.Event,
    ) -> None:
        while not stop.is_set() and server.failures <= self.sampling.retries:
            pause = server.resume_at - time.monotonic()
            if pause > 0:
                stop.wait(min(pause, 0.5))
                continue
            try:
                job = jobs.get(timeout=0.1)
            except queue.Empty:
                continue
            early = job.at - time.monotonic()
            if early > 0:  # the soonest of all: nothing to do until then
                jobs.put(job)
                stop.wait(min(early, 0.1))
                continue
            begun = time.monotonic()
            try:
                results.put(self._answer(server, job.request))
                server.failures = server.held_back = 0
                self._answered = time.monotonic()
            except PassingError as error:
                self._put_back(server, job, jobs, results, error, begun)
            except RefusedError as error:
                if error.status not in REFUSING:
                    results.put(UserError(f"the server at {server.address} answers with {error}."))
                    return
                results.put(Refused(job.request, str(error)))
            except (UserError, BadAnswerError) as error:
                results.put(UserError(f"the server at {server.address} cannot be used: {error}"))
                return

    def _put_back(
        self,
        server: Server,
        job: Job,
        jobs: queue.PriorityQueue[Job],
        results: queue.Queue[Completion | Refused | BaseException],
        error: PassingError,
        begun: float,
    ) -> None:
        """Wait and try again, or give up. begun: when the request was sent."""
        with server.lock:
            before = server.held_back if error.busy else job.attempts
            wait = error.wait if error.wait is not None else self._backoff(before)
            now = time.monotonic()
            fresh = begun >= server.failed_at  # the others were under way when it failed before
            if fresh:
                # A busy server is not a broken one: it is waited for as long as it says so.
                server.held_back += error.busy
                server.failures += not error.busy
                server.failed_at = now
            if error.busy or server.failures > 1:
                # Every request meets a server that is away for the first time: the pauses grow with the server's failures, or a
                # restart of a minute would use up all of them.
                pause = wait if error.wait is not None or error.busy else max(wait, self._backoff(server.failures - 1))
                server.resume_at = max(server.resume_at, now + pause)
        if server.failures > self.sampling.retries:
            logger.warning("the server at %s is left out: %s", server.address, error)
        left = any(other.failures <= self.sampling.retries for other in self.servers)
        attempts = job.attempts + (not error.busy)
        silent = time.monotonic() - self._answered > self.sampling.patience
        # A broken server may have had the request several times before it is left out.
        too_often = attempts >= (self.sampling.retries + 1) * len(self.servers)
        if not left or too_often or silent:
            what = "no server is left" if not left else f"a request failed {attempts} times"
            what = f"no server has answered for {self.sampling.patience:g} seconds" if silent else what
            results.put(
                UserError(
                    f"{what}: {server.address}: {error}. What was answered is kept; the same command continues."
                )
            )
            return
        jobs.put(Job(time.monotonic() + wait, job.number, job.request, attempts))

    def _backoff(self, attempts: int) -> float:
        return float(min(LONGEST_WAIT, self.sampling.backoff * 2**attempts))

    def _answer(self, server: Server, request: Request) -> Completion:
        body = server.protocol.request(request, self.sampling)
        answer = self._post(server.address + server.protocol.path, body)
        tokens, ended = server.protocol.answer(answer, request)
        return completion_of(request, tokens, ended, self.target.eos_token_ids, self.target.info.vocab_size)

    # ---- the check before the start ---------------------------------------------------------------------------------

    def _connect(self, address: str) -> Server:
        """The server at an address, after its protocol, its model and its tokenizer have been looked at."""
        tokenizer = self.target.tokenizer
        protocol = self._protocol(address)
        try:
            theirs = protocol.probed(self._patiently(address + protocol.path, protocol.probe(PROBE)))
        except RefusedError as error:
            raise UserError(f"the server at {address} refuses the probe: {error}.") from error
        except BadAnswerError as error:
            raise UserError(f"the server at {address} cannot be used: {error}.") from error
        same_tokenizer(address, tokenizer.encode(PROBE, add_special_tokens=False), theirs)
        return Server(address, protocol)

    def _protocol(self, address: str) -> Protocol:
        if self.sampling.protocol == "sglang":
            return SGLang()
        try:
            listed = self._patiently(address + "/v1/models", None)
        except RefusedError as error:
            raise UserError(
                f"{address} is neither a vLLM nor an SGLang server: /v1/models gives {error}. Check sampling.server."
            ) from error
        if self.sampling.protocol == "auto":
            try:
                self._post(address + "/get_model_info", None)
                return SGLang()
            except (RefusedError, PassingError):
                pass
        names = [str(entry.get("id")) for entry in listed.get("data", []) if isinstance(entry, dict)]
        wanted = self.sampling.served_model
        if (wanted and wanted not in names) or (not wanted and len(names) != 1):
            raise UserError(
                f"the server at {address} serves {', '.join(names) or 'nothing'}; "
                f"sampling.served_model is '{wanted}'. Name one of them."
            )
        return OpenAI(wanted or names[0])

    def _patiently(self, url: str, body: Any) -> dict[str, Any]:
        """Ask until there is an answer or the patience for passing errors has run out (then a `UserError`)."""
        for attempt in range(self.sampling.retries + 1):
            try:
                return self._post(url, body)
            except PassingError as error:
                if attempt == self.sampling.retries:
                    raise UserError(f"{url} does not answer: {error}. Is the server up?") from error
                time.sleep(error.wait if error.wait is not None else self._backoff(attempt))
        raise AssertionError("unreachable")

    # ---- HTTP ---------------------------------------------------------------------------------------------------------

    def _post(self, url: str, body: Any) -> dict[str, Any]:
        """One exchange: POST of JSON, or GET without a body. Raises `PassingError`, `RefusedError` or `UserError`."""
        headers = {"Content-Type": "application/json"}
        key = os.environ.get(self.sampling.key_variable)
        if key:
            headers["Authorization"] = f"Bearer {key}"
        data = None if body is None else json.dumps(body).encode()
        try:
            with OPENER.open(urllib.request.Request(url, data, headers), timeout=self.sampling.timeout) as answer:
                content = json.loads(answer.read(LARGEST_ANSWER))
        except urllib.error.HTTPError as error:
            raise _judged(error, self.sampling.key_variable) from error
        except (OSError, http.client.HTTPException, ValueError) as error:  # ValueError: half an answer is no JSON
            raise PassingError(f"{type(error).__name__}: {error}") from error
        if not isinstance(content, dict):
            raise PassingError("the answer is no JSON object")
        return content


def _judged(error: urllib.error.HTTPError, key_variable: str) -> Exception:
    """What an HTTP status means for the request."""
    try:
        said = error.read(400).decode("utf-8", "replace").strip()
    except (OSError, http.client.HTTPException):
        said = ""
    reason = f"status {error.code}" + (f" ({said})" if said else "")
    if error.code in PASSING:
        after = error.headers.get("Retry-After", "")
        wait = min(LONGEST_WAIT, float(after)) if after.replace(".", "", 1).isdigit() else None
        return PassingError(reason, wait, busy=error.code in BUSY)
    if error.code in (401, 403):
        return UserError(f"it wants a valid key; put it into the environment variable {key_variable}: {reason}")
    return RefusedError(reason, error.code)
