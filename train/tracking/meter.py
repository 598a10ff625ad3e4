"""The cost of a training: time by part, model FLOPs utilisation, peak memory, energy.

FLOPs are counted (train/planning/footprint.py) in the first step of a training and in every
hundredth after it, whichever session takes them: a counted step runs uncompiled, so that other
steps would make the weights depend on where sessions begin. In between the last count is used, as
only the share of supervised tokens varies. The count covers the matrix products and attention that
this process computes, including recomputations. Utilisation is their number over (the device's peak
x the time of the steps, including waiting, excluding measuring tau and saving).

Every process reads the energy of its own GPU and adds it to the sums of the next step or save, so
that the main process records the energy of all of them.
"""

from __future__ import annotations

import re
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from train.planning.devices import Peak, find_peak
from train.planning.footprint import FlopCount
from train.tracking.clock import PARTS, Clock
from train.tracking.energy import EnergyMeter

COUNT_EVERY = 100
ASIDE = ("evaluation", "saving")
"""Parts that are not training."""
STATUS = Path("/proc/self/status")


class Meter:
    """Measures one process. spent: the sums of earlier sessions: seconds by part, `setup` (before
    the loop), `device_seconds` (both, of all processes of the launch), `flops`, `joules`
    (`unmetered` if a process had no reading), and besides sums `peak_memory` (bytes) and
    `step_flops` (the last count). main: only the main process counts FLOPs. begun:
    `time.perf_counter()` when the training was requested. processes: those of this launch."""

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        spent: dict[str, float],
        *,
        peak_tflops: float = 0.0,
        clock: Clock | None = None,
        main: bool = True,
        begun: float | None = None,
        processes: int = 1,
    ) -> None:
        self.processes = processes
        # states of earlier versions do not tell how many processes their sessions had
        before = total_seconds(spent) + spent.get("setup", 0.0)
        spent.setdefault("device_seconds", before * processes)
        self.device, self.spent, self.main = device, spent, main
        self._asked = (device, dtype, peak_tflops)
        self.peak = find_peak(*self._asked) if main else Peak(0.0, "")
        self.energy = EnergyMeter(device)
        self.clock = clock or Clock.of(device)
        # of the last count; without one (states of earlier versions) 0 until the next
        self._flops, self._joules = spent.get("step_flops", 0.0), 0.0
        if begun is not None:
            setup = time.perf_counter() - begun
            spent["setup"] = spent.get("setup", 0.0) + setup
            spent["device_seconds"] += setup * processes
        self.clock.restart()

    @contextmanager
    def counting(self, step: int) -> Iterator[None]:
        """The context in which step number `step` (from 0, over all sessions) is taken."""
        if not self.main or step % COUNT_EVERY:
            yield
            return
        # Compiled code hides its operations, so the counted step runs uncompiled.
        with torch.compiler.set_stance("force_eager"), FlopCount() as count:
            yield
        self._flops = self.spent["step_flops"] = float(count.flops)

    def step(self) -> dict[str, float]:
        """The finished step's line in the log: seconds by part, mfu, peak_memory, joules."""
        self.spent["flops"] = self.spent.get("flops", 0.0) + self._flops
        taken = self.take()
        figures: dict[str, float] = {name: round(seconds, 6) for name, seconds in taken.items()}
        seconds = sum(passed for name, passed in taken.items() if name not in ASIDE)
        if self.peak.flops and self._flops and seconds > 0:
            figures["mfu"] = self._flops / (seconds * self.peak.flops)
        figures["peak_memory"] = int(self.spent["peak_memory"])
        joules = energy_used(self.spent)
        if joules is not None:
            figures["joules"] = joules
        return figures

    def take(self) -> dict[str, float]:
        """Seconds by part since the last call, added to the sums with memory and energy."""
        taken, spent = self.clock.take(), self.spent
        for name, seconds in taken.items():
            spent[name] = spent.get(name, 0.0) + seconds
        spent["device_seconds"] += sum(taken.values()) * self.processes
        self._joules += self.energy.take() or 0.0
        spent["peak_memory"] = max(spent.get("peak_memory", 0), peak_memory(self.device))
        return taken

    def own_energy(self) -> list[float]:
        """[joules of this GPU up to the last reading, returned only once; 1 if there is no reading,
        else 0], for `add_energy`."""
        joules, self._joules = self._joules, 0.0
        return [joules, float(not self.energy.available)]

    def add_energy(self, joules: float, silent: float) -> None:
        """Add the energy of all processes; it is None once any of them had no reading."""
        if silent:
            self.spent["unmetered"] = 1.0
        self.spent["joules"] = self.spent.get("joules", 0.0) + joules

    def finish(self) -> None:
        """Wait for the device, add the open measurements, and measure a CPU's peak again."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.take()
        if self.main:
            self.peak = find_peak(*self._asked, again=True)


def peak_memory(device: torch.device) -> int:
    """Most bytes so far: of tensors on CUDA; of the whole process (resident) on the CPU."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    # Linux first: there getrusage also counts what the parent held when it started this process
    found = re.search(r"VmHWM:\s+(\d+) kB", STATUS.read_text()) if STATUS.is_file() else None
    if found:
        return int(found.group(1)) * 1024
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def total_seconds(spent: dict[str, float]) -> float:
    """The total time of the training over all parts."""
    return sum(spent.get(name, 0.0) for name in PARTS)


def energy_used(spent: dict[str, float]) -> float | None:
    """Joules of all processes' GPUs, or None if a reading was missing at any time."""
    return None if "unmetered" in spent else spent.get("joules")


def utilisation(spent: dict[str, float], peak: float) -> float | None:
    """FLOPs over the device's peak in the steps' time; None if either is unknown."""
    seconds = total_seconds(spent) - sum(spent.get(name, 0.0) for name in ASIDE)
    flops = spent.get("flops", 0.0)
    return flops / (seconds * peak) if peak and flops and seconds > 0 else None
