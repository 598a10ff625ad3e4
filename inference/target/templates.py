"""Renders chat templates in separate processes (`template_worker`), with limits on time, memory and
output. A template comes with a tokenizer, and nothing else would stop one that never ends.

A process starts with the first conversation, is kept for the following ones, and ends with this
process. It gets only the part of this process's environment that Python needs.
"""

from __future__ import annotations

import atexit
import json
import os
import selectors
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from heads.api.errors import UserError
from inference.target import template_worker
from inference.target.template_worker import LENGTH, LONGEST, MEMORY

KEPT = (
    "PATH HOME LANG LC_ALL LC_CTYPE TZ TMPDIR LD_LIBRARY_PATH DYLD_LIBRARY_PATH VIRTUAL_ENV "
    "PYTHONHOME SYSTEMROOT HF_HOME"
).split()
"""Environment variables that are passed to the process."""
OWN = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
SECONDS = 10
"""Most CPU time of one rendering; ordinary ones take some milliseconds."""
PATIENCE = 300.0
"""Seconds without an answer after which the process counts as lost. On a busy machine, `SECONDS` of
CPU time may take long."""
LARGEST_ANSWER = 16 * LONGEST
PIECE = 1 << 20


@dataclass(frozen=True)
class Rendered:
    """A conversation's text, and the spans [start, end) of characters in `{% generation %}`."""

    text: str
    spans: list[tuple[int, int]]


class WorkerLostError(Exception):
    """The process has ended, or does not answer."""


class Worker:
    """A process that renders one conversation at a time; the caller holds `lock` meanwhile."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def render(self, request: Mapping[str, object]) -> dict[str, Any]:
        """The process's answer. Raises `WorkerLostError`; the next call then starts a new
        process."""
        try:
            content = json.dumps(request, default=plain).encode()
        except (ValueError, TypeError, RecursionError) as error:
            raise UserError(
                f"this conversation cannot be given to a chat template ({error}). Its tools and "
                "arguments must be plain values, not nested deeply."
            ) from error
        process = self._process or self._start()
        try:
            assert process.stdin is not None
            process.stdin.write(len(content).to_bytes(LENGTH, "big") + content)
            process.stdin.flush()
            deadline = time.monotonic() + PATIENCE
            length = int.from_bytes(self._read(process, LENGTH, deadline), "big")
            if length > LARGEST_ANSWER:
                raise WorkerLostError
            answer: dict[str, Any] = json.loads(self._read(process, length, deadline))
        except BaseException as error:
            self.stop()
            if isinstance(error, (OSError, ValueError)):
                raise WorkerLostError from error
            raise
        return answer

    def stop(self) -> None:
        """End the process, if there is one."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def forget(self) -> None:
        """Drop the process in a forked child, as it belongs to the parent."""
        process, self._process, self.lock = self._process, None, threading.Lock()
        for stream in (process.stdin, process.stdout) if process is not None else ():
            if stream is not None:
                os.close(stream.fileno())

    def _start(self) -> subprocess.Popen[bytes]:
        """Start the process and wait until it is ready; raises `UserError` if that fails."""
        environment = {name: os.environ[name] for name in KEPT if name in os.environ} | OWN
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        program = [sys.executable, "-P", str(Path(template_worker.__file__)), str(SECONDS)]
        try:
            self._process = process = subprocess.Popen(
                program,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,  # a Ctrl-C at the terminal is for this process
            )
        except OSError as error:
            raise UserError(
                f"the process for chat templates cannot be started ({error}). Free memory or "
                "processes."
            ) from error
        try:
            self._read(process, LENGTH, time.monotonic() + PATIENCE)
        except BaseException as error:
            with suppress(subprocess.TimeoutExpired):
                process.wait(1)  # to get its own exit status, not that of being killed
            self.stop()
            if not isinstance(error, WorkerLostError):
                raise
            raise UserError(
                "the process for chat templates ended as it started, with status "
                f"{process.returncode}. What it says: `{shlex.join(program)} </dev/null`."
            ) from error
        return process

    def _read(self, process: subprocess.Popen[bytes], count: int, deadline: float) -> bytes:
        """The next `count` bytes; raises `WorkerLostError` at the end, or at the deadline."""
        assert process.stdout is not None
        parts, missing, place = [], count, process.stdout.fileno()
        with selectors.DefaultSelector() as selector:
            selector.register(place, selectors.EVENT_READ)
            while missing:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise WorkerLostError
                parts.append(os.read(place, min(missing, PIECE)))
                if not parts[-1]:
                    raise WorkerLostError
                missing -= len(parts[-1])
        return b"".join(parts)


WORKERS = (Worker(), Worker())
"""A second process starts if the first one is busy: a server has one thread for long prompts, and
short prompts must not wait for it."""
for _worker in WORKERS:
    atexit.register(_worker.stop)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_worker.forget)


@contextmanager
def free_worker() -> Iterator[Worker]:
    """Hold a free worker, or wait for the first one."""
    worker = next((one for one in WORKERS if one.lock.acquire(blocking=False)), None)
    if worker is None:
        worker = WORKERS[0]
        worker.lock.acquire()
    lock = worker.lock
    try:
        yield worker
    finally:
        lock.release()


def render(
    template: str,
    messages: Sequence[Mapping[str, object]],
    values: Mapping[str, object],
    marks: bool = False,
) -> Rendered:
    """Render a conversation. values: further variables; marks: whether spans are returned.

    Raises `UserError` for a template that refuses the conversation, has an error, or exceeds its
    limits of time or memory.
    """
    chat = [{key: value for key, value in one.items() if value is not None} for one in messages]
    request = {"template": template, "messages": chat, "values": dict(values), "marks": marks}
    try:
        with free_worker() as worker:
            answer = worker.render(request)
    except WorkerLostError as error:
        raise UserError(
            f"the chat template was ended: it took more than {SECONDS} seconds of computing or "
            f"{MEMORY // 1024**2} MiB for one conversation. Shorten the conversation, or use "
            "another chat template."
        ) from error
    if "error" in answer:
        raise UserError(f"the chat template refuses this conversation: {answer['error']}")
    return Rendered(answer["text"], [(start, end) for start, end in answer["spans"]])


def plain(value: object) -> object:
    """A value without a type in JSON, as transformers' own rendering shows it to a template."""
    item = getattr(value, "item", None)
    if callable(item) and getattr(value, "shape", None) == ():
        return item()  # a scalar of numpy
    return f"<{type(value).__name__}>"
