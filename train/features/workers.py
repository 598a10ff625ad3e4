"""Threads that work through a queue. They are daemons, so they do not keep the process alive."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

Result = TypeVar("Result")


class Fetch(Future[Result]):
    """The future of a thread's work."""

    def wait(self, seconds: float) -> bool:
        """Wait at most `seconds`; returns whether it has ended."""
        return bool(wait_for([self], seconds).done)


class Workers(Generic[Result]):
    """A number of threads that start their work in the order in which it was submitted."""

    def __init__(self, count: int, name: str) -> None:
        self._queue: SimpleQueue[tuple[Fetch[Result], Callable[[], Result]] | None] = SimpleQueue()
        work = partial(threading.Thread, target=self._work, name=name, daemon=True)
        self._threads = [work() for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def submit(self, work: Callable[[], Result]) -> Fetch[Result]:
        """Let a thread call `work`, unless its future was cancelled by then."""
        coming: Fetch[Result] = Fetch()
        self._queue.put((coming, work))
        return coming

    def _work(self) -> None:
        while (given := self._queue.get()) is not None:
            coming, work = given
            if not coming.set_running_or_notify_cancel():
                continue
            try:
                coming.set_result(work())
            except Exception as error:  # noqa: BLE001 - raised where it is waited for
                coming.set_exception(error)

    def end(self) -> None:
        """Start no further work; work that has not started is cancelled."""
        with suppress(Empty):
            while True:
                given = self._queue.get_nowait()
                if given is not None:
                    given[0].cancel()
        for _ in self._threads:
            self._queue.put(None)

    def join(self, seconds: float) -> None:
        """Wait for threads that still work, together at most `seconds`."""
        for thread in self._threads:
            thread.join(seconds / len(self._threads))
