"""Time by part: exclusive, complete, read late on devices; collectives; peaks; energy."""

from __future__ import annotations

import sys
import threading
import types
from typing import Any

import pytest
import torch
import torch.distributed as dist

from heads.api.errors import UserError
from train.distributed import join_world
from train.planning import devices
from train.tracking import energy
from train.tracking.clock import PARTS, Clock, timing_collectives
from train.tracking.energy import EnergyMeter


class Told:
    """A timeline whose marks are told beforehand; the device is behind until it is said how far it
    has come."""

    def __init__(self, *marks: float) -> None:
        self.marks, self.done = iter(marks), float("inf")

    def mark(self) -> float:
        return next(self.marks)

    def between(self, first: float, second: float) -> float | None:
        return second - first if second <= self.done else None


def known(clock: Clock) -> dict[str, float]:
    return {name: seconds for name, seconds in clock.take().items() if seconds}


def test_parts_are_exclusive_and_add_up() -> None:
    clock = Clock(Told(0, 1, 3, 7, 12, 20))
    with clock.part("drafter"), clock.part("target"):  # from 1; 3 to 7
        pass
    # the drafter ends at 12, the reading is at 20
    assert known(clock) == {"other": 1 + 8, "drafter": 2 + 5, "target": 4}


def test_an_error_ends_its_part() -> None:
    clock = Clock(Told(0, 1, 2, 3))
    with pytest.raises(ValueError, match="x"), clock.part("data"):
        raise ValueError("x")
    assert known(clock) == {"other": 2, "data": 1}


def test_what_the_device_has_not_reached_comes_with_a_later_reading() -> None:
    timeline = Told(0, 1, 3, 4, 10)
    clock = Clock(timeline)
    with clock.part("drafter"):
        pass
    timeline.done = 1
    assert known(clock) == {"other": 1}
    timeline.done = 10
    assert known(clock) == {"drafter": 2, "other": 1 + 6}


def test_a_function_within_a_part() -> None:
    clock = Clock(Told(0, 1, 5, 6))
    double = clock.within("target", lambda x: x * 2)
    assert float(double(torch.tensor(2.0))) == 4.0
    assert known(clock) == {"other": 2, "target": 4}


def test_the_host_clock_loses_nothing() -> None:
    clock = Clock()
    first = clock._last
    for name in PARTS:
        with clock.part(name):
            torch.randn(50, 50) @ torch.randn(50, 50)
    taken = clock.take()
    assert sum(taken.values()) == pytest.approx(clock._last - first)
    assert all(seconds > 0 for seconds in taken.values())


def test_collectives_are_communication_also_when_waited_for() -> None:
    plain = dist.all_reduce
    # and stay: DeepSpeed, in other tests of this process, keeps groups of groups
    join_world("cpu", always=True)
    clock = Clock(Told(*range(20)))
    with timing_collectives(clock):
        assert dist.all_reduce is not plain
        value = torch.ones(3)
        dist.all_reduce(value)
        work = dist.all_reduce(value, async_op=True)
        work.wait()
        assert work.is_completed()
        # fetches ahead, say
        beside = threading.Thread(target=lambda: dist.all_reduce(torch.ones(1)))
        beside.start()
        beside.join()
    assert dist.all_reduce is plain
    assert known(clock)["communication"] == 3
    assert value.tolist() == [1.0, 1.0, 1.0]


def test_functions_kept_from_an_earlier_training_count_for_the_one_that_runs() -> None:
    """As DeepSpeed keeps them."""
    join_world("cpu", always=True)
    first, second = Clock(Told(*range(20))), Clock(Told(*range(20)))
    with timing_collectives(first):
        kept = dist.all_reduce
    kept(torch.ones(1))
    with timing_collectives(second):
        kept(torch.ones(1))
        dist.all_reduce(torch.ones(1))
    assert "communication" not in known(first)
    assert known(second)["communication"] == 2


def test_the_peak_is_given_looked_up_or_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert devices.find_peak(cpu, torch.float32, 2.0) == devices.Peak(2e12, "train.peak_tflops")
    measured = devices.find_peak(cpu, torch.float32)
    assert measured.flops > 1e8
    assert measured.source.startswith("measured: 1024^3 float32 matrix product")
    for name, peak in (
        ("NVIDIA H100 80GB HBM3", 989.4e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L4", 121e12),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert devices.find_peak(cuda, torch.bfloat16).flops == peak
    for name in ("NVIDIA L40", "NVIDIA RTX A1000", "NVIDIA A10G", "NVIDIA GH200 480GB"):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert devices.find_peak(cuda, torch.bfloat16).flops == 0
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Thing")
    assert devices.find_peak(cuda, torch.bfloat16) == devices.Peak(
        0.0, "Thing is not in the table; give train.peak_tflops"
    )
    with pytest.raises(UserError, match="Did you mean 'h100'"):
        devices.gpu("h10")


def fake_nvml(counter: bool) -> Any:
    """A stand-in for the library and the card behind it: 250 W, and 100 J between two readings of
    the counter."""
    nvml = types.ModuleType("pynvml")
    readings = iter(range(0, 1000, 100))

    class NVMLError(Exception):
        pass

    def total(handle: str) -> int:
        if not counter:
            raise NVMLError("not supported")
        return next(readings) * 1000

    for name, value in (
        ("NVMLError", NVMLError),
        ("nvmlInit", lambda: None),
        ("nvmlDeviceGetHandleByUUID", lambda uuid: uuid),
        ("nvmlDeviceGetTotalEnergyConsumption", total),
        ("nvmlDeviceGetPowerUsage", lambda handle: 250_000),
    ):
        setattr(nvml, name, value)
    return nvml


@pytest.mark.parametrize("counter", [True, False])
def test_energy_is_counted_or_integrated(monkeypatch: pytest.MonkeyPatch, counter: bool) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(counter))
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(uuid="x")
    )
    times = iter([10.0, 12.0, 15.0])
    monkeypatch.setattr(energy.time, "monotonic", lambda: next(times))
    meter = EnergyMeter(torch.device("cuda"))
    assert meter.available
    assert [meter.take(), meter.take()] == ([100.0, 100.0] if counter else [500.0, 750.0])


def test_without_nvml_there_is_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    assert EnergyMeter(torch.device("cpu")).take() is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    meter = EnergyMeter(torch.device("cuda"))
    assert not meter.available
    assert meter.take() is None
