"""A device that lags behind the host, as a GPU does, in a thread: what it is given runs in order
while the host goes on, and a step's phases take as long as a test wants."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from inference.decoding.clock import BORDERS, StepClock
from inference.decoding.engine import Engine
from inference.decoding.execution import graphs
from inference.decoding.execution.accelerator import Pending


class Later:
    """What a job will have given."""

    def __init__(self, job: Callable[[], Any]) -> None:
        self.job, self.done = job, threading.Event()
        self.value: Any = None
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            with torch.no_grad():
                self.value = self.job()
        except Exception as error:  # noqa: BLE001  the host raises it
            self.error = error
        self.done.set()

    def synchronize(self) -> None:
        self.done.wait()
        if self.error is not None:
            raise self.error


class SlowDevice:
    """See the module. refuses: what capturing raises; captured: how often it was asked for."""

    def __init__(self, refuses: str = "", capture_seconds: float = 0.0) -> None:
        self.refuses, self.capture_seconds, self.captured = refuses, capture_seconds, 0
        self.jobs: queue.SimpleQueue[Later | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._work, daemon=True)
        self.thread.start()

    def _work(self) -> None:
        while (job := self.jobs.get()) is not None:
            job.run()

    def submit(self, job: Callable[[], Any]) -> Later:
        later = Later(job)
        self.jobs.put(later)
        return later

    def stop(self) -> None:
        self.jobs.put(None)
        self.thread.join()

    # As an accelerator

    def run(self, step: Callable[[], tuple[Tensor, Any]]) -> tuple[Later, Any]:
        later = self.submit(step)
        later.synchronize()
        packed, state = later.value
        later.value = packed
        return later, state

    def wait(self) -> None:
        self.submit(lambda: None).synchronize()

    def capture(self, step: Callable[[], Tensor]) -> Callable[[], Later]:
        self.captured += 1
        time.sleep(self.capture_seconds)
        if self.refuses:
            raise RuntimeError(self.refuses)
        return lambda: self.submit(step)

    def ring(self, slots: int) -> SlowDevice:
        return self

    def send(self, packed: Later, clock: StepClock | None) -> Pending:
        buffer: list[Tensor] = []
        sent = self.submit(lambda: buffer.append(packed.value.clone()))
        return _Arriving(buffer, sent, clock)


class _Arriving(Pending):
    """A result whose buffer is there once it has arrived."""

    def __init__(self, buffer: list[Tensor], sent: Later, clock: StepClock | None) -> None:
        super().__init__(torch.empty(0), sent, clock)
        self.buffer = buffer

    def read(self) -> list[list[int]]:
        self.event.synchronize()
        (self.packed,) = self.buffer
        return super().read()


@contextmanager
def decoding_on(device: SlowDevice, engine: Engine, phase_seconds: float) -> Iterator[None]:
    """Let an engine decode there; each of a step's phases takes `phase_seconds` longer."""
    clock = engine.clock
    clock.times = torch.zeros(len(BORDERS), dtype=torch.int64)
    border = clock.border

    def slowly(ended: str) -> None:
        if ended:
            time.sleep(phase_seconds)
        border(ended)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clock, "border", slowly)
        patch.setattr(graphs, "accelerator_of", lambda _: device)
        try:
            yield
        finally:
            device.stop()


@contextmanager
def every_engine_on(device: SlowDevice) -> Iterator[None]:
    """Let all engines that are made within the block decode there."""
    made = StepClock.__init__

    def with_times(clock: StepClock, kind: torch.device) -> None:
        made(clock, kind)
        clock.times = torch.zeros(len(BORDERS), dtype=torch.int64)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepClock, "__init__", with_times)
        patch.setattr(graphs, "accelerator_of", lambda _: device)
        try:
            yield
        finally:
            device.stop()


FIRST_TOKEN = 5
"""Column of a packed result with the first token that a step commits (`StepResult.packed`)."""


class StaleDevice(SlowDevice):
    """Replays hand over the first token that the replay before committed."""

    def capture(self, step: Callable[[], Tensor]) -> Callable[[], Later]:
        committed: list[Tensor] = []

        def late() -> Tensor:
            packed = step().clone()
            committed.append(packed[:, FIRST_TOKEN].clone())
            packed[:, FIRST_TOKEN] = committed[-2:][0]
            return packed

        return super().capture(late)
