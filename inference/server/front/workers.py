"""Threads that work off the jobs of an event loop, the clients in turn."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from inference.server.front.fair import FairQueue

Job = tuple[Future[Any], Callable[[], Any]]


class FairWorkers:
    """`count` daemon threads. Unlike those of a `ThreadPoolExecutor` they do not hold up the end of
    the process, and no client's jobs wait for all of another's."""

    def __init__(self, count: int, name: str) -> None:
        self._queue: FairQueue[Job] = FairQueue()
        self._changed = threading.Condition()
        self._stopped = False
        for number in range(count):
            threading.Thread(target=self._work, name=f"{name}-{number}", daemon=True).start()

    def submit(self, client: str, work: Callable[[], Any]) -> Future[Any]:
        """Have `work` done. A future that is cancelled before its turn is not worked on."""
        future: Future[Any] = Future()
        with self._changed:
            self._queue.put(client, (future, work))
            self._changed.notify()
        return future

    def stop(self) -> None:
        """End the threads after what they are at; jobs that wait are cancelled."""
        with self._changed:
            self._stopped = True
            while len(self._queue):
                self._queue.get()[0].cancel()
            self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                while not len(self._queue):
                    if self._stopped:
                        return
                    self._changed.wait()
                future, work = self._queue.get()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = work()
            except BaseException as error:  # noqa: BLE001 - whoever waits for the result gets it
                future.set_exception(error)
            else:
                future.set_result(result)
            del future, work
