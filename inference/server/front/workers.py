"""Threads that run jobs of an event loop; clients take turns."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from inference.server.front.fair import FairQueue, Place

Result = TypeVar("Result")
Job = tuple[Future[Any], Callable[[], Any]]


class FairWorkers:
    """`count` daemon threads. Unlike those of a `ThreadPoolExecutor`, they do not delay the end of
    the process, and no client's jobs wait for all jobs of another."""

    def __init__(self, count: int, name: str) -> None:
        self._queue: FairQueue[Job] = FairQueue()
        self._changed = threading.Condition()
        self._stopped = False
        for number in range(count):
            threading.Thread(target=self._work, name=f"{name}-{number}", daemon=True).start()

    def submit(self, client: str, work: Callable[[], Result]) -> Future[Result]:
        """Queue `work`. If its future is cancelled before its turn, it does not run."""
        future: Future[Result] = Future()
        with self._changed:
            self._queue.put(client, (future, work))
            self._changed.notify()
        return future

    def stop(self) -> None:
        """End the threads after their current jobs; waiting jobs are cancelled."""
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
            except BaseException as error:  # noqa: BLE001 - raised where the result is awaited
                future.set_exception(error)
            else:
                future.set_result(result)
            del future, work


async def work_in_turn(
    workers: FairWorkers,
    place: Place,
    work: Callable[[], Result],
    displaced: Callable[[], Exception],
) -> Result:
    """Run `work` when it is the turn of the place's client; returns or raises what it does. If the
    place goes to another client before that, raises `displaced()`."""
    made, lost = workers.submit(place.client, work), False

    def displace() -> bool:
        nonlocal lost
        lost = made.cancel()
        return lost

    place.displace = displace
    try:
        return await asyncio.wrap_future(made)
    except asyncio.CancelledError:
        if lost:
            raise displaced() from None
        raise
    finally:
        place.displace = None
