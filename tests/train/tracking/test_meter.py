"""A training's cost as it is added up: sessions, setup, utilisation, energy over processes."""

from __future__ import annotations

import subprocess
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train.tracking.test_clock import Told, fake_nvml
from train.planning import devices
from train.tracking.clock import Clock
from train.tracking.energy import EnergyMeter
from train.tracking.meter import Meter, energy_used, total_seconds, utilisation

CPU = torch.device("cpu")


def test_a_step_is_added_to_what_earlier_sessions_spent() -> None:
    spent = {"drafter": 2.0, "other": 1.0, "evaluation": 4.0, "setup": 1.0, "flops": 1e6}
    begun = time.perf_counter()
    clock = Clock(Told(0, 10, 11, 14, 15))
    # at 10: nobody's until here
    meter = Meter(CPU, torch.float32, spent, peak_tflops=2e-6, clock=clock, begun=begun)
    with meter.counting(0), clock.part("drafter"):  # from 11 to 14
        torch.ones(8, 16) @ torch.ones(16, 4)
    figures = meter.step()  # at 15
    flops = 2 * 8 * 16 * 4
    assert (figures["drafter"], figures["other"], figures["evaluation"]) == (3.0, 2.0, 0.0)
    assert figures["mfu"] == pytest.approx(flops / (5.0 * 2e6))
    assert "joules" not in figures  # no GPU, no figure
    assert (spent["drafter"], spent["other"], total_seconds(spent)) == (5.0, 3.0, 12.0)
    assert spent["flops"] == 1e6 + flops
    assert utilisation(spent, 2e6) == pytest.approx((1e6 + flops) / (8.0 * 2e6))
    assert 1.0 <= spent["setup"] <= 1.0 + time.perf_counter() - begun
    assert spent["peak_memory"] == figures["peak_memory"] > 2**20


def test_device_seconds_count_the_processes_of_every_session() -> None:
    spent = {"drafter": 2.0, "setup": 1.0}  # of a version that did not count them
    for processes in (2, 1):
        clock = Clock(Told(0, 10, 13))  # 3 s of each session
        Meter(CPU, torch.float32, spent, clock=clock, main=False, processes=processes).take()
    assert spent["device_seconds"] == 2 * (3 + 3) + 3


def test_the_steps_that_run_uncompiled_do_not_depend_on_where_sessions_begin() -> None:
    """A step is counted by its number; a session uses the last session's count until then."""
    spent: dict[str, float] = {}
    taken: list[int] = []
    compiled: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        return lambda *given: (compiled.append(taken[-1]), graph(*given))[1]

    step = torch.compile(torch.sin, backend=backend)
    for session in ((0, 1), (2, 99, 100, 101)):
        meter = Meter(CPU, torch.float32, spent)
        for number in session:
            taken.append(number)
            with meter.counting(number):
                step(torch.ones(2))
                torch.ones(8, 16) @ torch.ones(16, 4)
            meter.step()
    assert compiled == [1, 2, 99, 101]
    assert spent["flops"] == 6 * spent["step_flops"] == 6 * 2 * 8 * 16 * 4


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no /proc")
@pytest.mark.parametrize(
    "script",
    [
        "from train.tracking.meter import peak_memory; import torch; "
        "print(peak_memory(torch.device('cpu')))",
        "from scripts.evidence.foreign.speculators_worker import peak_bytes; print(peak_bytes())",
    ],
)
def test_peak_memory_is_that_of_the_process_alone(script: str, repository: Path) -> None:
    """getrusage's figure begins with what the parent has."""
    held = b"1" * (1 << 30)  # more than importing torch takes
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=repository
    )
    assert 2**20 < int(found.stdout) < len(held)


def test_every_process_hands_out_its_energy_once_and_one_that_cannot_tell_leaves_no_figure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(counter=True))
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(uuid="x")
    )
    spent: dict[str, float] = {}
    meter = Meter(CPU, torch.float32, spent, main=False)
    assert meter.own_energy() == [0.0, 1.0]
    meter.energy = EnergyMeter(torch.device("cuda"))  # 100 J from reading to reading
    meter.take()
    meter.take()
    assert meter.own_energy() == [200.0, 0.0]
    assert meter.own_energy() == [0.0, 0.0]
    meter.add_energy(200.0 + 300.0, 0.0)  # another process used 300 J
    assert meter.step()["joules"] == energy_used(spent) == 500.0
    meter.add_energy(100.0, 1.0)
    assert energy_used(spent) is None
    assert "joules" not in meter.step()


def test_a_noisy_probe_does_not_decide_the_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_probes", {})
    probes = iter([0.2, 0.1, 0.4])  # seconds per product: a busy machine, a free one, a busier one
    now: list[float] = []
    monkeypatch.setattr(devices, "_time_product", lambda left, right: now[-1])

    def peak(again: bool) -> devices.Peak:
        now.append(next(probes))
        return devices.find_peak(CPU, torch.float32, again=again)

    flops, threads = 2 * 1024**3, torch.get_num_threads()
    name = f"measured: 1024^3 float32 matrix product, {threads} threads, highest of"
    assert peak(False) == devices.Peak(flops / 0.2, f"{name} 1 probe")
    # not measured again
    assert devices.find_peak(CPU, torch.float32) == devices.Peak(flops / 0.2, f"{name} 1 probe")
    assert peak(True) == devices.Peak(flops / 0.1, f"{name} 2 probes")
    assert peak(True) == devices.Peak(flops / 0.1, f"{name} 3 probes")


def test_a_meter_looks_at_the_peak_again_when_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_probes", {})
    # one slow product, then a whole probe
    products = iter([0.9, 0.3, *[0.3] * devices.PROBE_REPEATS])
    monkeypatch.setattr(devices, "_time_product", lambda left, right: next(products))
    meter = Meter(CPU, torch.float32, {})
    assert meter.peak.flops == 2 * 1024**3 / 0.9
    meter.finish()
    assert meter.peak.flops == 2 * 1024**3 / 0.3
