"""A stand-in for what torch.cuda has of streams, events and graphs, on a machine without a GPU: it
keeps the current device and streams as CUDA does, refuses what CUDA refuses, and records the rest.
Operations run on the CPU when they are launched, and nothing runs in a replay."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

FIRST, SECOND = torch.device("cuda:0"), torch.device("cuda:1")


class Stream:
    """A stream of a device; the current one's if none is given."""

    def __init__(self, cuda: RecordedCuda, device: torch.device | None = None) -> None:
        self.cuda, self.device = cuda, device or cuda.device

    def wait_stream(self, other: Stream) -> None:
        self.cuda.waits.append((self, other))


class Event:
    """An event, which belongs to the device of the first stream it is recorded on."""

    def __init__(self, cuda: RecordedCuda, enable_timing: bool = False) -> None:
        self.cuda, self.timed = cuda, enable_timing
        self.device: torch.device | None = None
        cuda.events.append(self)

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or self.cuda.current_stream()
        self.device, self.stream = self.device or stream.device, stream
        if self.device != stream.device:
            raise RuntimeError(f"event of {self.device} recorded on {stream.device}")

    def synchronize(self) -> None:
        assert self.device is not None, "waits for an event that was never recorded"

    def elapsed_time(self, end: Event) -> float:
        assert self.timed and end.timed and self.device == end.device is not None
        return 1.0


class Graph:
    """A graph with what it was captured with; replays: how often it ran."""

    stream: Stream
    pool: Any
    mode: str

    def __init__(self, cuda: RecordedCuda) -> None:
        self.replays = 0
        cuda.graphs.append(self)

    def replay(self) -> None:
        assert self.stream, "replays a graph that was not captured"
        self.replays += 1


class RecordedCuda:
    """See the module. capturing: whether a graph is being captured; end_fails: whether ending the
    capture that an error has left raises, as after an operation that CUDA cannot capture;
    keeps_routing: whether allocations then still go to the graph's pool, as with torch 2.11;
    routed: the devices and pools that allocations go to; released: those given up."""

    def __init__(self) -> None:
        self.device = FIRST
        self.current: dict[torch.device, Stream] = {}
        self.waits: list[tuple[Stream, Stream]] = []
        self.synchronised: list[torch.device] = []
        self.events: list[Event] = []
        self.graphs: list[Graph] = []
        self.routed: list[tuple[int, Any]] = []
        self.released: list[tuple[int, Any]] = []
        self.capturing = self.end_fails = self.keeps_routing = False

    def install(self, patch: pytest.MonkeyPatch) -> RecordedCuda:
        """Take the place of torch.cuda's own."""

        def ours(kind: Callable[..., Any]) -> Callable[..., Any]:
            return lambda *given, **named: kind(self, *given, **named)

        def synchronize(device: torch.device | None = None) -> None:
            self.synchronised.append(device or self.device)

        parts = {"Stream": ours(Stream), "Event": ours(Event), "CUDAGraph": ours(Graph)}
        parts |= {"device": self.on, "stream": self.within, "graph": self.capture}
        parts |= {"current_stream": self.current_stream, "synchronize": synchronize}
        for name, part in parts.items():
            patch.setattr(torch.cuda, name, part)
        patch.setattr(torch.cuda, "graph_pool_handle", object)
        patch.setattr(torch._C, "_cuda_endAllocateToPool", self.end_routing, raising=False)
        patch.setattr(torch._C, "_cuda_releasePool", self.release_pool, raising=False)
        patch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
        return self

    def current_stream(self, device: torch.device | None = None) -> Stream:
        device = device or self.device
        return self.current.setdefault(device, Stream(self, device))

    def end_routing(self, device: int, pool: Any) -> None:
        if (device, pool) not in self.routed:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.routed.remove((device, pool))

    def release_pool(self, device: int, pool: Any) -> None:
        self.released.append((device, pool))

    @contextmanager
    def on(self, device: torch.device) -> Iterator[None]:
        before, self.device = self.device, device
        try:
            yield
        finally:
            self.device = before

    @contextmanager
    def within(self, stream: Stream) -> Iterator[None]:
        """The stream and its device are current in the block."""
        before = self.current_stream(stream.device)
        with self.on(stream.device):
            self.current[stream.device] = stream
            try:
                yield
            finally:
                self.current[stream.device] = before

    @contextmanager
    def capture(
        self,
        graph: Graph,
        pool: Any = None,
        stream: Stream | None = None,
        capture_error_mode: str = "global",
    ) -> Iterator[None]:
        self.synchronised.append(self.device)
        if self.routed:  # torch frees unused memory before a capture
            raise RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED")
        graph.stream, graph.pool, graph.mode = stream or Stream(self), pool, capture_error_mode
        outer = self.within(graph.stream)
        outer.__enter__()
        self.capturing = True
        self.routed.append((graph.stream.device.index, pool))
        try:
            yield
        except BaseException as error:
            self.capturing = False
            if not (self.end_fails and self.keeps_routing):
                self.routed.clear()
            if self.end_fails:
                # torch then leaves the stream current, but not the device
                self.device = self.synchronised[-1]
                raise RuntimeError("operation failed due to a previous error") from error
            outer.__exit__(None, None, None)
            raise
        self.capturing = False
        self.routed.clear()
        outer.__exit__(None, None, None)
