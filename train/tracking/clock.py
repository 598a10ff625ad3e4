"""The time of a training by part, measured without slowing it down.

A `Clock` is a sequence of marks: whenever the kind of work changes, the time since the last mark is
counted for the previous kind, so the parts add up to the whole. On CUDA, a mark is an event in the
stream, which is read after the device has passed it. Nothing waits for a clock, so readings are
delayed by as much as the host runs ahead.

    target          the frozen target's forward pass, and its logits if a loss needs them
    drafter         the drafter's forward and backward pass
    update          clipping and AdamW
    data            waiting for rows, or for features that come from elsewhere
    communication   inside collectives, waiting for slower processes included
    evaluation      measuring tau, and the last comparison of training with decoding
    saving          states and best checkpoints
    other           everything else of the loop
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

PARTS = ("target", "drafter", "update", "data", "communication", "evaluation", "saving", "other")
COLLECTIVES = (
    "all_reduce broadcast reduce barrier all_gather all_gather_into_tensor all_gather_object "
    "gather scatter reduce_scatter reduce_scatter_tensor all_to_all_single broadcast_object_list"
).split()
"""Functions of torch.distributed whose time counts as communication."""


class Timeline(Protocol):
    """Sets marks, and measures the seconds between two; None until the device has reached them."""

    def mark(self) -> Any: ...

    def between(self, first: Any, second: Any) -> float | None: ...


class HostTimeline:
    """The CPU's clock."""

    def mark(self) -> float:
        return time.perf_counter()

    def between(self, first: float, second: float) -> float:
        return second - first


class DeviceTimeline:
    """Events in the current CUDA stream."""

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, first: torch.cuda.Event, second: torch.cuda.Event) -> float | None:
        """Seconds, once the device has passed the second event; never waits for it."""
        return first.elapsed_time(second) / 1000.0 if second.query() else None


class Clock:
    """Assigns time to parts. Starts when it is created, in `other`."""

    def __init__(self, timeline: Timeline | None = None) -> None:
        self.timeline = timeline or HostTimeline()
        self._stack = ["other"]
        self._open: deque[tuple[str, Any, Any]] = deque()
        self._last = self.timeline.mark()

    @classmethod
    def of(cls, device: torch.device) -> Clock:
        return cls(DeviceTimeline() if device.type == "cuda" else HostTimeline())

    def restart(self) -> None:
        """Start again, in the current part; the time before belongs to no part."""
        self._open.clear()
        self._last = self.timeline.mark()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time inside the block belongs to `name`, except for parts within it."""
        self._switch()
        self._stack.append(name)
        try:
            yield
        finally:
            self._switch()
            self._stack.pop()

    def _switch(self) -> None:
        now = self.timeline.mark()
        self._open.append((self._stack[-1], self._last, now))
        self._last = now

    def take(self) -> dict[str, float]:
        """Seconds per part that have become known since the last call."""
        self._switch()
        seconds = dict.fromkeys(PARTS, 0.0)
        while self._open:
            name, first, second = self._open[0]
            passed = self.timeline.between(first, second)
            if passed is None:
                break
            seconds[name] += passed
            self._open.popleft()
        return seconds

    def within(self, name: str, function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """`function`, whose time belongs to `name`."""

        @wraps(function)
        def timed(given: Tensor) -> Tensor:
            with self.part(name):
                return function(given)

        return timed


class _TimedWork:
    """A collective in flight: waiting for it is communication."""

    def __init__(self, work: Any, clock: Clock) -> None:
        self._work, self._clock = work, clock

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        with self._clock.part("communication"):
            return self._work.wait(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


_counting: list[tuple[Clock, int]] = []
"""The clock of the training that runs now, and its thread; empty if there is none."""


def _timed(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, whose time is communication of the training that runs when it is called:
    DeepSpeed keeps such functions from the process's first training for all later ones."""

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        clock, owner = _counting[-1] if _counting else (None, 0)
        # Threads that fetch ahead run in parallel to the training. Threads of the backward pass
        # run instead of it.
        beside = threading.get_ident() != owner and torch._C._current_graph_task_id() == -1
        if clock is None or beside:
            return function(*args, **kwargs)
        with clock.part("communication"):
            work = function(*args, **kwargs)
        return _TimedWork(work, clock) if isinstance(work, dist.Work) else work

    return run


@contextmanager
def timing_collectives(clock: Clock) -> Iterator[None]:
    """Count time in torch.distributed's collectives as communication, from any caller. Put it
    around making the engine as well: DeepSpeed keeps some of these functions when it starts."""
    plain = {name: getattr(dist, name) for name in COLLECTIVES if hasattr(dist, name)}
    for name, function in plain.items():
        setattr(dist, name, _timed(function))
    _counting.append((clock, threading.get_ident()))
    try:
        yield
    finally:
        _counting.pop()
        for name, function in plain.items():
            setattr(dist, name, function)
