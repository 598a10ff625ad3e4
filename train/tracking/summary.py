"""The costs and results of a training: `summary.json`, `tau.png` and a table.

`Summary` is the file's schema, its reader and its documentation. All seconds are those of the main
process, whose clock stands for all; device-hours count every process of the launch. Time and energy
that a killed session spent after its last saved state are not included. A run that was stopped by a
signal leaves a summary too.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Literal

import torch
from pydantic import BaseModel, Field
from rich.table import Table

from heads.api.errors import UserError
from heads.api.reading import read_bytes
from inference.manifest import write_json
from inference.target.memory import gib
from train.config import TrainingJob
from train.data.pack import PackReport
from train.distributed import World
from train.loop import Progress
from train.planning.devices import Peak
from train.tracking.clock import PARTS
from train.tracking.meter import energy_used, total_seconds, utilisation
from train.tracking.tracker import read_log

SUMMARY_FILE, PLOT_FILE = "summary.json", "tau.png"
NO_NVIDIA = "no NVIDIA GPU"
"""Why energy is not known: only NVML reports it."""


class Device(BaseModel):
    """The device of the training."""

    kind: Literal["cpu", "cuda"]
    name: str
    threads: int | None = Field(None, exclude_if=lambda threads: threads is None)
    """Threads of torch; CPUs only."""
    processes: int
    """All processes of the launch."""
    trainers: int = Field(default_factory=lambda known: known["processes"])
    """Those that train; with features.mode=group the others run the target. Not in first files."""


class EngineFacts(BaseModel):
    """Settings of the engine."""

    name: str
    zero_stage: int
    precision: str


class PeakFacts(BaseModel):
    """What `mfu` is a share of."""

    tflops: float
    source: str
    """From a table, given, or measured on a CPU: at the start and at the end, the higher one."""


class Tau(BaseModel):
    """A measurement of tau after `step` updates."""

    step: int
    tau: float
    tau_ci95: tuple[float, float]


class RankedTau(Tau):
    """A measurement of tau, and whether it was the best one until then."""

    best: bool


class Summary(BaseModel):
    """The content of summary.json; files of all versions can be read."""

    format: Literal[1] = 1
    kind: str
    """Kind of the drafter."""
    device: Device
    engine: EngineFacts
    features: str
    """features.mode."""
    steps: int
    ended_by: str
    """What ended the training, as in its manifest, or the name of the signal."""
    tokens: int
    tokens_per_second: float | None
    padding: float
    """Share of the positions of the packed rows."""
    seconds: dict[str, float]
    """By part (`train.tracking.clock.PARTS`)."""
    shares: dict[str, float]
    """Of `wall_seconds`, by part."""
    wall_seconds: float
    """Sum of `seconds`: from the first step on."""
    setup_seconds: float = 0.0
    """Before the first step, all sessions: loading, packing, the first comparison of training with
    decoding; not imports. Not in the first files."""
    device_hours: float
    """(`setup_seconds` + `wall_seconds`) x processes / 3600, added up over the sessions, without
    feature servers."""
    flops: float
    """Of the main process."""
    mfu: float | None
    """Model FLOPs utilisation of the main process; None where the peak is unknown."""
    peak: PeakFacts
    peak_memory_bytes: int
    energy_joules: float | None
    """Sum over the GPUs of the training processes; None where one of them had no reading."""
    energy_source: str = ""
    """Whose energy it is, or why there is none. Not in the first files."""
    best: Tau | None
    taus: list[RankedTau]


def read_summary(path: str | Path) -> Summary:
    """The summary of a run, given its folder or file; raises `UserError` if it cannot be read."""
    file = Path(path)
    file = file / SUMMARY_FILE if file.is_dir() else file
    advice = "Give the folder of a finished `headstart train`."
    content = read_bytes(file, advice)
    try:
        return Summary.model_validate_json(content)
    except ValueError as error:
        raise UserError(f"'{file}' is no summary of a training. {advice}") from error


def summarise(
    job: TrainingJob,
    progress: Progress,
    reason: str,
    world: World,
    packing: PackReport,
    peak: Peak,
    log: Path,
) -> Summary:
    """The summary of a run that has ended by `reason`. log: its log.jsonl."""
    spent = progress.spent
    seconds, setup = total_seconds(spent), spent.get("setup", 0.0)
    by_part = {name: spent.get(name, 0.0) for name in PARTS}
    processes, joules = world.size + world.helpers, energy_used(spent)
    best = None
    if progress.tau is not None:
        best = Tau(step=progress.best_step, tau=progress.tau, tau_ci95=progress.tau_ci95)
    return Summary(
        kind=job.kind,
        device=describe(world, processes),
        engine=EngineFacts.model_validate(job.engine, from_attributes=True),
        features=job.features.mode,
        steps=progress.step,
        ended_by=reason,
        tokens=progress.tokens,
        tokens_per_second=progress.tokens / progress.seconds if progress.seconds else None,
        padding=packing.padding_share,
        seconds=by_part,
        shares={name: part / seconds if seconds else 0.0 for name, part in by_part.items()},
        wall_seconds=seconds,
        setup_seconds=setup,
        device_hours=spent.get("device_seconds", 0.0) / 3600,
        flops=spent.get("flops", 0.0),
        mfu=utilisation(spent, peak.flops),
        peak=PeakFacts(tflops=peak.flops / 1e12, source=peak.source),
        peak_memory_bytes=int(spent.get("peak_memory", 0)),
        energy_joules=joules,
        energy_source=energy_source(world, joules),
        best=best,
        taus=[RankedTau.model_validate(line) for line in read_log(log) if "tau" in line],
    )


def energy_source(world: World, joules: float | None) -> str:
    """The GPUs whose energy it is, or why there is none."""
    if joules is not None:
        return f"NVML, the GPUs of {world.size} training process{'es' * (world.size > 1)}"
    if world.device.type != "cuda":
        return NO_NVIDIA
    return (
        "NVML did not tell in every process and session; it is read through the package "
        "nvidia-ml-py"
    )


def describe(world: World, processes: int) -> Device:
    """The device of this process, for all `processes` of the launch."""
    counts = {"processes": processes, "trainers": world.size}
    if world.device.type == "cuda":
        return Device(kind="cuda", name=torch.cuda.get_device_name(world.device), **counts)
    name = platform.processor() or platform.machine()
    return Device(kind="cpu", name=name, threads=torch.get_num_threads(), **counts)


def write_summary(summary: Summary, out: Path) -> Table:
    """Write summary.json and, if tau was measured, tau.png to `out`; returns a table to show."""
    if summary.taus:
        plot_tau(summary, out / PLOT_FILE)
    write_json(out / SUMMARY_FILE, summary.model_dump(mode="json"))
    found = Table(show_header=False, box=None, pad_edge=False)
    for name, text in rows(summary):
        found.add_row(name, text)
    return found


def rows(summary: Summary) -> list[tuple[str, str]]:
    """Name and text of every line of the table."""
    device, peak, best = summary.device, summary.peak, summary.best
    speed, mfu, joules = summary.tokens_per_second, summary.mfu, summary.energy_joules
    helpers = device.processes - device.trainers
    running = f", of which {helpers} run{'s' * (helpers == 1)} the target" if helpers else ""
    used = "unknown" if mfu is None else f"{mfu:.1%} of {peak.tflops:.4g} TFLOP/s"
    measured = "unknown" if joules is None else f"{joules / 3.6e6:.3f} kWh"
    source = summary.energy_source
    energy = f"n/a ({source})" if source == NO_NVIDIA else f"{measured} ({source})"
    before, after = f"{summary.setup_seconds:,.1f} s", f"{summary.wall_seconds:,.1f} s"
    hours = f"{summary.device_hours:.4g} ({device.processes} x {device.name}{running})"
    shares = (f"{name} {part:.1%}" for name, part in summary.shares.items() if part >= 0.0005)
    found = [
        ("device-hours", hours),
        ("setup", f"{before} before the first step, {after} from there"),
        ("tokens", f"{summary.tokens:,}" + (f", {speed:,.0f} per second" if speed else "")),
        ("padding", f"{summary.padding:.1%}"),
        ("time", ", ".join(shares)),
        ("utilisation", f"{used} ({peak.source})"),
        ("peak memory", gib(summary.peak_memory_bytes)),
        ("energy", energy),
    ]
    if best is not None:
        low, high = best.tau_ci95
        found.append(("best", f"tau {best.tau:.3f} [{low:.3f}, {high:.3f}] at step {best.step}"))
    return found


def plot_tau(summary: Summary, path: Path) -> None:
    """Plot tau and its interval over the steps, as a PNG."""
    from matplotlib.figure import Figure

    steps, taus = [each.step for each in summary.taus], [each.tau for each in summary.taus]
    low, high = zip(*(each.tau_ci95 for each in summary.taus), strict=True)
    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.add_subplot()
    axes.fill_between(steps, low, high, alpha=0.25, linewidth=0)
    axes.plot(steps, taus, marker="o", markersize=3)
    if summary.best is not None:
        x, y = [summary.best.step], [summary.best.tau]
        axes.plot(x, y, marker="*", markersize=12, color="#D55E00", linestyle="none")
    title = f"{summary.kind}: tau over training"
    axes.set(xlabel="step", ylabel="tau (95% interval over prompts)", title=title)
    axes.grid(alpha=0.3)
    partial = path.with_name(path.name + ".partial")
    figure.savefig(partial, dpi=130, format="png")
    os.replace(partial, path)
