"""What a training cost and what came out of it: `summary.json`, `tau.png` and a table.

All seconds are those of the main process, whose clock stands for all; device-hours count every process of the launch. Time and
energy that a killed session spent after its last saved state are not in it. A run that a signal stopped leaves a summary too.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

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

FORMAT = 1
SUMMARY_FILE, PLOT_FILE = "summary.json", "tau.png"


def summarise(
    job: TrainingJob, progress: Progress, reason: str, world: World, packing: PackReport, peak: Peak, log: Path
) -> dict[str, Any]:
    """The content of summary.json; see docs/formats.md."""
    spent = progress.spent
    seconds, setup = total_seconds(spent), spent.get("setup", 0.0)
    processes = world.size + world.helpers
    taus = [
        {key: line[key] for key in ("step", "tau", "tau_ci95", "best")} for line in read_log(log) if "tau" in line
    ]
    return {
        "format": FORMAT,
        "kind": job.kind,
        "device": {**describe(world.device), "processes": processes, "trainers": world.size},
        "engine": {"name": job.engine.name, "zero_stage": job.engine.zero_stage, "precision": job.engine.precision},
        "features": job.features.mode,
        "steps": progress.step,
        "ended_by": reason,
        "tokens": progress.tokens,
        "tokens_per_second": progress.tokens / progress.seconds if progress.seconds else None,
        "padding": packing.padding_share,
        "seconds": {name: spent.get(name, 0.0) for name in PARTS},
        "shares": {name: spent.get(name, 0.0) / seconds if seconds else 0.0 for name in PARTS},
        "wall_seconds": seconds,
        "setup_seconds": setup,
        "device_hours": (setup + seconds) * processes / 3600,
        "flops": spent.get("flops", 0.0),
        "mfu": utilisation(spent, peak.flops),
        "peak": {"tflops": peak.flops / 1e12, "source": peak.source},
        "peak_memory_bytes": int(spent.get("peak_memory", 0)),
        "energy_joules": energy_used(spent),
        "energy_source": energy_source(world, energy_used(spent)),
        "best": {"step": progress.best_step, "tau": progress.tau, "tau_ci95": list(progress.tau_ci95)}
        if progress.tau is not None
        else None,
        "taus": taus,
    }


def energy_source(world: World, joules: float | None) -> str:
    """Whose energy it is, or why there is none."""
    if joules is not None:
        return f"NVML, the GPUs of {world.size} training process{'es' * (world.size > 1)}"
    if world.device.type != "cuda":
        return "NVML tells of NVIDIA GPUs alone"
    return "NVML did not tell in every process and session; it is read through the package nvidia-ml-py"


def describe(device: torch.device) -> dict[str, Any]:
    """Kind, name and, for CPUs, threads of a device."""
    if device.type == "cuda":
        return {"kind": "cuda", "name": torch.cuda.get_device_name(device)}
    return {
        "kind": "cpu",
        "name": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
    }


def write_summary(content: Mapping[str, Any], out: Path) -> Table:
    """Write summary.json and, where tau was measured, tau.png to `out`; returns the table to be shown."""
    if content["taus"]:
        plot_tau(content, out / PLOT_FILE)
    write_json(out / SUMMARY_FILE, content)
    return table(content)


def table(content: Mapping[str, Any]) -> Table:
    """The summary for people."""
    found = Table(show_header=False, box=None, pad_edge=False)
    for name, text in rows(content):
        found.add_row(name, text)
    return found


def rows(content: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Name and text of every line of the table."""
    device, best = content["device"], content["best"]
    speed, mfu, joules = content["tokens_per_second"], content["mfu"], content["energy_joules"]
    helpers = device["processes"] - device["trainers"]
    running = f", of which {helpers} run{'s' * (helpers == 1)} the target" if helpers else ""
    shares = ", ".join(f"{name} {share:.1%}" for name, share in content["shares"].items() if share >= 0.0005)
    found = [
        ("device-hours", f"{content['device_hours']:.4g} ({device['processes']} x {device['name']}{running})"),
        ("setup", f"{content['setup_seconds']:,.1f} s before the first step, {content['wall_seconds']:,.1f} s from there"),
        ("tokens", f"{content['tokens']:,}" + (f", {speed:,.0f} per second" if speed else "")),
        ("padding", f"{content['padding']:.1%}"),
        ("time", shares),
        (
            "utilisation",
            f"{mfu:.1%} of {content['peak']['tflops']:.4g} TFLOP/s ({content['peak']['source']})"
            if mfu is not None
            else f"unknown ({content['peak']['source']})",
        ),
        ("peak memory", gib(content["peak_memory_bytes"])),
        ("energy", f"{'unknown' if joules is None else f'{joules / 3.6e6:.3f} kWh'} ({content['energy_source']})"),
    ]
    if best is not None:
        low, high = best["tau_ci95"]
        found.append(("best", f"tau {best['tau']:.3f} [{low:.3f}, {high:.3f}] at step {best['step']}"))
    return found


def plot_tau(content: Mapping[str, Any], path: Path) -> None:
    """tau and its interval over the steps, as a PNG."""
    from matplotlib.figure import Figure

    taus = content["taus"]
    steps = [each["step"] for each in taus]
    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.add_subplot()
    axes.fill_between(
        steps, [each["tau_ci95"][0] for each in taus], [each["tau_ci95"][1] for each in taus], alpha=0.25, linewidth=0
    )
    axes.plot(steps, [each["tau"] for each in taus], marker="o", markersize=3)
    best = content["best"]
    axes.plot([best["step"]], [best["tau"]], marker="*", markersize=12, color="#D55E00", linestyle="none")
    axes.set(xlabel="step", ylabel="tau (95% interval over prompts)", title=f"{content['kind']}: tau over training")
    axes.grid(alpha=0.3)
    partial = path.with_name(path.name + ".partial")
    figure.savefig(partial, dpi=130, format="png")
    os.replace(partial, path)
