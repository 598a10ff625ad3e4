"""Running steps on an accelerator while the host goes on: launched, or captured and replayed.

`graphs.StepRunner` uses only the `Accelerator` interface. A test implements it with a thread that
lags behind (tests/inference/decoding/slow_device.py).

Legend: B rows, C columns of a step's packed result.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor

from heads.kernels.dispatch import on_device
from inference.decoding.clock import BORDERS, StepClock

Result = TypeVar("Result")
_UNENDED: list[Any] = []
"""Graphs of captures that torch could not end. They are kept until the process ends: torch's
allocator of pinned memory goes on asking them which streams they capture."""


@dataclass
class Pending:
    """The result of a launched step on its way to the host.

    packed: [B, C] int64 (`StepResult.packed`); event: recorded after the copy; clock: counts the
    step's times, the last columns, when the result is read. The last two are None for a step that
    is complete when its call returns.
    """

    packed: Tensor
    event: Any = None
    clock: StepClock | None = None

    def read(self) -> list[list[int]]:
        """Wait for the copy (usually complete) and return the rows as plain numbers."""
        if self.event is not None:
            self.event.synchronize()
        rows = cast(list[list[int]], self.packed.tolist())
        if self.clock is None:
            return rows
        self.clock.book(rows[0][-len(BORDERS) :])
        return [row[: -len(BORDERS)] for row in rows]


class Ring(Protocol):
    """Host buffers for the results of steps of one shape, used in turn."""

    def send(self, packed: Any, clock: StepClock | None) -> Pending:
        """Start the copy of a result. The previous result in this buffer must have been read."""


class Accelerator(Protocol):
    """A device that runs submitted steps in order while the host goes on."""

    def run(self, step: Callable[[], tuple[Tensor, Any]]) -> tuple[Any, Any]:
        """Launch a step operation by operation; returns its packed result and the drafter's
        state."""

    def wait(self) -> None:
        """Return when all submitted work is done."""

    def capture(self, step: Callable[[], Tensor]) -> Callable[[], Any]:
        """Record a step without running it. The returned function replays it and returns its packed
        result, which the next replay overwrites. If the capture fails, the error is that of the
        operation that cannot be captured, of any type."""

    def ring(self, slots: int) -> Ring:
        """Buffers for results of one shape."""


class CudaAccelerator:
    """A CUDA device. Steps are launched and captured on a separate stream. All captured steps share
    one memory pool, since they run one after another."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self._pool: Any = None

    def run(self, step: Callable[[], Result]) -> Result:
        """See `Accelerator`."""
        current = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            found = step()
        current.wait_stream(self.stream)
        return found

    def wait(self) -> None:
        """See `Accelerator`."""
        torch.cuda.synchronize(self.device)

    def capture(self, step: Callable[[], Result]) -> Callable[[], Result]:
        """See `Accelerator`. Other threads may call CUDA meanwhile."""
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        failed: list[Exception] = []
        try:
            with (
                # before a capture, torch waits for the current device and frees its unused memory
                on_device(self.device),
                # if ending a failed capture raises, torch leaves the capture's stream current
                torch.cuda.stream(torch.cuda.current_stream(self.device)),
                torch.cuda.graph(
                    graph, pool=self._pool, stream=self.stream, capture_error_mode="thread_local"
                ),
            ):
                try:
                    found = step()
                except Exception as error:
                    failed.append(error)
                    raise
        except BaseException:
            self._end_allocation(graph)
            if not failed:
                raise
        if failed:  # the error of ending the capture does not name the operation
            raise failed.pop()

        def replay() -> Result:
            graph.replay()
            return found

        return replay

    def _end_allocation(self, graph: Any) -> None:
        """End the allocation to the pool after a failed capture. torch 2.11 does not if ending the
        capture raises; freeing unused memory, and every later capture, then fail in the whole
        process."""
        try:
            torch._C._cuda_endAllocateToPool(self.device.index, self._pool)
        except (AttributeError, RuntimeError):
            return  # torch has done it
        _UNENDED.append(graph)
        pool, self._pool = self._pool, None  # torch refuses a pool that no graph holds
        with suppress(RuntimeError):
            torch._C._cuda_releasePool(self.device.index, pool)

    def ring(self, slots: int) -> Ring:
        """See `Accelerator`."""
        return _PinnedRing(self.device, slots)


class _PinnedRing:
    """Pinned host buffers, each with an event."""

    def __init__(self, device: torch.device, slots: int) -> None:
        self.device = device
        self.slots: list[tuple[Tensor, Any] | None] = [None] * slots
        self.next = 0

    def send(self, packed: Tensor, clock: StepClock | None) -> Pending:
        """See `Ring`."""
        place, self.next = self.next, (self.next + 1) % len(self.slots)
        slot = self.slots[place]
        if slot is None:
            slot = torch.empty_like(packed, device="cpu").pin_memory(), torch.cuda.Event()
            self.slots[place] = slot
        buffer, event = slot
        buffer.copy_(packed, non_blocking=True)
        event.record(torch.cuda.current_stream(self.device))
        return Pending(buffer, event, clock)


def capture_failure(error: Exception) -> str:
    """What a failed capture raised, for a message: the type and the first line."""
    lines = str(error).strip().splitlines()
    return ": ".join([type(error).__name__, *lines[:1]])


def accelerator_of(device: torch.device) -> Accelerator | None:
    """The accelerator of a device; None for a device that the host waits for."""
    return CudaAccelerator(device) if device.type == "cuda" else None
