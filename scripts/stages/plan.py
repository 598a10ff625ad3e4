"""`headstart train --plan`: predicts memory, disk and hours of a training, and writes them to <run>/plan/<drafter>.json.

    headstart train --plan experiment=llama31_8b_eagle3 plan.gpu=h100 plan.count=8 plan.tokens=200000000

Without `plan.gpu` and `plan.measured` a few real steps are taken here, which needs the target and the answers.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from inference.manifest import write_json
from inference.target.memory import gib
from scripts.config.schema import Settings
from scripts.run.folder import answers_folder, stage_folder
from scripts.run.process import prepare_process, shown
from train.config import TrainingJob
from train.planning.plan import Speed, make_plan
from train.run import train
from train.tracking.summary import Summary, read_summary
from train.tracking.tracker import TrackerConfig


def run(settings: Settings) -> None:
    """Plan, write the plan down and show it."""
    prepare_process(settings.run)
    job = job_of(settings)
    content = make_plan(job, settings.plan, speed_of(job, settings))
    path = settings.run.directory / "plan" / f"{stage_folder(settings).name}.json"
    write_json(path, content)
    Console(soft_wrap=True).print(table(content))
    print(f"written to {shown(path)}; the target was not loaded for this" if settings.plan.gpu else f"written to {shown(path)}")


def job_of(settings: Settings) -> TrainingJob:
    """The training that is planned."""
    return TrainingJob(
        settings.head.kind, settings.head.config, settings.target, answers_folder(settings), stage_folder(settings),
        settings.train, settings.features, settings.engine, settings.optim, settings.schedule, settings.decode, settings.joint,
    )  # fmt: skip


def speed_of(job: TrainingJob, settings: Settings) -> Speed:
    """How fast it will be: by a GPU's figures, by a run's summary, or by real steps taken now."""
    plan = settings.plan
    if plan.gpu:
        return Speed.of(plan)
    if plan.measured:
        return Speed.read(read_summary(plan.measured), plan.measured)
    with tempfile.TemporaryDirectory(prefix="headstart-plan-") as folder:
        return Speed.read(few_steps(job, plan.steps, Path(folder)), f"{plan.steps} steps here")


def few_steps(job: TrainingJob, steps: int, folder: Path) -> Summary:
    """The summary of so many real steps of the training, of which nothing is kept."""
    config = replace(
        job.config, max_steps=steps, eval_every=0, save_every=0, parity=False, tracker=TrackerConfig(wandb="disabled")
    )
    train(
        job.kind, job.head, target=job.target, data=job.data, out=folder, config=config, features=job.features,
        engine=job.engine, optim=job.optim, schedule=job.schedule, decode=job.decode, joint=job.joint,
    )  # fmt: skip
    found = read_summary(folder)
    # nothing was measured, one state written
    return found.model_copy(update={"seconds": {**found.seconds, "evaluation": 0.0, "saving": 0.0}})


def table(content: Mapping[str, Any]) -> Table:
    """The plan for people."""
    found = Table(show_header=False, box=None, pad_edge=False)
    settings, memory, step = content["settings"], content["memory_bytes"], content["step_seconds"]
    fits = {True: "fits", False: "does NOT fit", None: ""}[content["fits"]]
    room = f" of {gib(int(content['memory_capacity']))}: {fits}" if content["memory_capacity"] else ""
    target, drafter = content["target"], content["drafter"]
    found.add_row("target", f"{target['path']}: {target['parameters']:,} weights, {target['active']:,} of the layers per token")
    found.add_row("drafter", f"{drafter['kind']}: {drafter['trained_weights']:,} trained weights")
    beside = content["target_process_bytes"]
    found.add_row("memory per trainer" if beside else "memory per process", f"{gib(memory['total'])}{room}")
    for name, count in memory.items():
        if name != "total" and count:
            found.add_row(f"  {name}", gib(count))
    if beside:
        found.add_row("memory per target process", gib(beside["total"]))
    disk = content["disk_bytes"]
    found.add_row("disk", f"states {gib(disk['states'])}, best {gib(disk['best'])}")
    stores = ", ".join(f"{fmt} {gib(count)}" for fmt, count in disk["feature_store"].items())
    found.add_row("  feature store, if any", stores)
    rows_of_features(found, content)
    parts = ", ".join(f"{name} {seconds:.3g}" for name, seconds in step.items() if name != "total")
    found.add_row("seconds per step", f"{step['total']:.3g} ({parts})")
    found.add_row("speed", content["speed"]["source"])
    found.add_row(
        "time",
        f"{content['hours']:.3g} h for {content['steps']:,} steps, {content['device_hours']:.3g} device-hours on "
        f"{settings['processes']} (measuring tau comes on top unless it was measured)",
    )
    return found


def rows_of_features(found: Table, content: Mapping[str, Any]) -> None:
    """Add where the target runs, and what its features take of disks or network."""
    beforehand, settings, reading = content["target_pass"], content["settings"], content["reading"]
    once = f"; making it: {beforehand['device_hours']:.3g} device-hours" if settings["features"] == "store" else ""
    found.add_row("target runs", beforehand["where"] + once)
    if reading is not None:
        found.add_row("  a trainer holds of it", f"{settings['trainer_target']} (features.trainer_target)")
        found.add_row(
            "features read",
            f"{rate(reading['process_bytes_per_second'])} per trainer, {rate(reading['total_bytes_per_second'])} in all "
            f"({reading['bytes_per_token']:,.0f} bytes a token); the time assumes that they arrive as fast",
        )


def rate(bytes_per_second: float) -> str:
    """Bytes per second for people."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if bytes_per_second >= size:
            return f"{bytes_per_second / size:.3g} {unit}/s"
    return f"{bytes_per_second / 1e3:.3g} kB/s"
