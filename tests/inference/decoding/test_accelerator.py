"""The CUDA accelerator, on stand-ins that record streams, graphs and events: everything is on the
target's device, whichever device is current."""

from __future__ import annotations

import pytest
import torch

import inference.decoding.execution.accelerator as accelerator_module
from inference.decoding.execution.accelerator import CudaAccelerator, capture_failure
from tests.inference.decoding.recorded_cuda import FIRST, SECOND, RecordedCuda, Stream


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> RecordedCuda:
    return RecordedCuda().install(monkeypatch)


def noted(cuda: RecordedCuda, seen: list[tuple[torch.device, Stream]]) -> torch.Tensor:
    """A step that notes the current device and stream."""
    seen.append((cuda.device, cuda.current_stream()))
    return torch.arange(6).view(1, 6)


def test_launched_steps_are_ordered_with_the_work_before_and_after(cuda: RecordedCuda) -> None:
    seen: list[tuple[torch.device, Stream]] = []
    accelerator = CudaAccelerator(SECOND)
    found = accelerator.run(lambda: (noted(cuda, seen), "state"))
    own, outer = accelerator.stream, cuda.current_stream(SECOND)
    assert found[1] == "state" and own.device == SECOND and own is not outer
    assert seen == [(SECOND, own)]
    assert cuda.waits == [(own, outer), (outer, own)]
    assert cuda.device == FIRST
    accelerator.wait()
    assert cuda.synchronised == [SECOND]


def test_graphs_are_captured_on_the_own_stream_into_one_pool(cuda: RecordedCuda) -> None:
    seen: list[tuple[torch.device, Stream]] = []
    accelerator = CudaAccelerator(SECOND)
    replays = [accelerator.capture(lambda: noted(cuda, seen)) for _ in range(2)]
    assert seen == [(SECOND, accelerator.stream)] * 2
    assert [graph.stream for graph in cuda.graphs] == [accelerator.stream] * 2
    assert cuda.graphs[0].pool is cuda.graphs[1].pool is not None
    # other threads may call CUDA during a capture
    assert {graph.mode for graph in cuda.graphs} == {"thread_local"}
    assert cuda.synchronised == [SECOND] * 2  # before a capture: the device's own work
    results = [replay() for replay in (*replays, replays[0])]
    assert [graph.replays for graph in cuda.graphs] == [2, 1]
    assert results[0] is results[2] is not results[1]  # a replay overwrites its own result
    assert len(seen) == 2 and cuda.device == FIRST


@pytest.mark.parametrize("end_fails", [False, True])
def test_a_failed_capture_leaves_device_and_stream_as_they_were(
    cuda: RecordedCuda, end_fails: bool
) -> None:
    accelerator, outer, cuda.end_fails = CudaAccelerator(SECOND), Stream(cuda, SECOND), end_fails

    def step() -> torch.Tensor:
        raise KeyError("a step")

    with cuda.within(outer):
        with pytest.raises(KeyError, match="a step"):  # not the error of ending the capture
            accelerator.capture(step)
        assert cuda.current_stream() is outer and cuda.device == SECOND
    assert cuda.device == FIRST


@pytest.mark.parametrize("keeps_routing", [False, True])
def test_a_failed_capture_leaves_the_allocator_as_it_was(
    cuda: RecordedCuda, keeps_routing: bool
) -> None:
    accelerator, cuda.end_fails, cuda.keeps_routing = CudaAccelerator(SECOND), True, keeps_routing
    kept = len(accelerator_module._UNENDED)

    def step() -> torch.Tensor:
        raise KeyError("a step")

    with pytest.raises(KeyError):
        accelerator.capture(step)
    (failed,) = cuda.graphs
    assert not cuda.routed
    # where torch has ended the allocation itself, it owns the pool's release, too
    assert cuda.released == ([(SECOND.index, failed.pool)] if keeps_routing else [])
    assert accelerator_module._UNENDED[kept:] == ([failed] if keeps_routing else [])
    accelerator.capture(lambda: torch.zeros(1))()
    assert cuda.graphs[1].replays == 1
    assert (cuda.graphs[1].pool is failed.pool) is not keeps_routing


def test_results_are_copied_into_buffers_in_turn(cuda: RecordedCuda) -> None:
    ring = CudaAccelerator(SECOND).ring(2)
    sent = [ring.send(torch.full((1, 3), value), None) for value in range(2)]
    assert [pending.read() for pending in sent] == [[[0] * 3], [[1] * 3]]
    later = ring.send(torch.full((1, 3), 7), None)
    assert later.packed is sent[0].packed and later.event is sent[0].event
    assert len(cuda.events) == 2  # one of each buffer
    assert {event.device for event in cuda.events} == {SECOND}
    assert all(event.stream is cuda.current_stream(SECOND) for event in cuda.events)


def test_a_failure_is_named_by_its_type_and_first_line() -> None:
    assert capture_failure(RuntimeError("not permitted\nmore")) == "RuntimeError: not permitted"
    assert capture_failure(KeyError()) == "KeyError"
