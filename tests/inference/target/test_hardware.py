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
from inference.target.hardware import found_device, wait_for
from inference.target.loading import TargetConfig, pick_device

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
