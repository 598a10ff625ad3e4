"""Which device is taken, and how the host waits for one that torch knows and we have no kernels
for; stood in for by what torch says of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from heads.api.errors import UserError
from heads.kernels import dispatch
from heads.kernels.dispatch import choose
from inference.decoding.clock import StepClock
from inference.decoding.config import DecodeConfig
from inference.decoding.execution import graphs
from inference.decoding.execution.accelerator import accelerator_of
from inference.kernels.reference.attention import TREE_ATTENTION
from inference.target.hardware import found_device, release_unused, wait_for
from inference.target.loading import TargetConfig, pick_device
from inference.target.memory import free_bytes

XPU = torch.device("xpu", 0)


@pytest.fixture
def xpu(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """A machine with an XPU and no CUDA; what was waited for."""
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("xpu"))
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    return waited


def test_another_accelerator_is_taken_by_its_name(
    xpu: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert pick_device("auto").type == found_device().type == "cpu"
    assert pick_device("xpu:0") == XPU
    assert TargetConfig("x", device="xpu", dtype="auto").dtype_name == "bfloat16"
    assert TargetConfig("x", device="auto", dtype="auto").dtype_name == "float32"
    with pytest.raises(UserError, match=r"no CUDA device is available\. Use target.device=cpu"):
        pick_device("cuda")
    with pytest.raises(UserError, match="no MPS device is available"):
        pick_device("mps")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert pick_device("auto").type == "cuda"


def test_steps_there_are_launched_one_by_one_and_waited_for(xpu: list[torch.device]) -> None:
    assert accelerator_of(XPU) is None
    assert DecodeConfig().steps_behind(XPU) == 0
    assert choose(TREE_ATTENTION, XPU, torch.bfloat16).implementation == "reference"
    clock = StepClock(XPU)
    assert clock.times is None
    clock.start()
    clock.border("draft")
    clock.border("verify")
    assert xpu == [XPU] * 3
    assert clock.seconds["draft"] > 0 and clock.seconds["verify"] > 0


def test_steps_of_an_amd_gpu_are_launched_and_never_captured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its clock cannot be written, so that a graph would have no times."""
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    dispatch._obstacle.cache_clear()
    device = torch.device("cuda", 0)
    decoder: Any = SimpleNamespace(drafter=None, clock=StepClock(device))
    dispatch._obstacle.cache_clear()
    decoder.clock.border("")
    decoder.clock.border("draft")
    assert decoder.clock.times is None and waited == [device]
    assert not graphs._captures(decoder, DecodeConfig()).wanted


def test_a_cpu_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*given: Any) -> None:
        raise AssertionError("nothing runs there")

    monkeypatch.setattr(torch.accelerator, "synchronize", never)
    wait_for(torch.device("cpu"))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert found_device().type in ("cpu", "cuda")


def test_memory_that_cannot_be_released_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """After a failed capture, torch's allocator may refuse."""

    def refuse() -> None:
        raise RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", refuse)
    release_unused()
    assert "could not be released: captures_underway" in caplog.text


def test_memory_that_graphs_keep_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other steps cannot use the pool of a captured graph; that of a graph that is gone can be
    released."""

    def segment(pool: tuple[int, int], total: int, allocated: int, device: int = 0) -> Any:
        sizes = {"total_size": total, "allocated_size": allocated}
        return {"device": device, "segment_pool_id": pool, **sizes}

    gone = segment((0, 1), 1000, 0)
    segments = [segment((0, 0), 300, 100), segment((0, 2), 70, 30), segment((0, 2), 5, 0, 1), gone]
    there = [2000]

    def release() -> None:
        segments.remove(gone)
        there[0] += gone["total_size"]

    def total(size: str) -> Any:
        return lambda device: sum(s[size] for s in segments if s["device"] == device.index)

    answers = {"is_available": lambda: True, "get_allocator_backend": lambda: "native"}
    answers |= {"empty_cache": release, "memory_snapshot": lambda: segments}
    answers |= {"mem_get_info": lambda device: (there[0], 0)}
    answers |= {"memory_reserved": total("total_size")}
    answers |= {"memory_allocated": total("allocated_size")}
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    assert free_bytes(torch.device("cuda:0")) == 2000 + 1000 + 200
