"""`headstart train --plan`: predicts memory, disk and hours of a training, and writes them to
<run>/plan/<drafter>.json.

    headstart train --plan experiment=llama31_8b_eagle3 plan.gpu=h100 \
        plan.count=8 plan.tokens=200000000

Without `plan.gpu` and `plan.measured` a few real steps are taken here, which needs the target and
the answers.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from inference.manifest import write_json
from scripts.config.schema import Settings
from scripts.run.folder import answers_folder, stage_folder
from scripts.run.process import prepare_process, shown
from train.config import TrainingJob
from train.planning.plan import Speed, make_plan
from train.planning.table import plan_table
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
    Console(soft_wrap=True).print(plan_table(content))
    print(
        f"written to {shown(path)}; the target was not loaded for this"
        if settings.plan.gpu
        else f"written to {shown(path)}"
    )


def job_of(settings: Settings) -> TrainingJob:
    """The training that is planned."""
    return TrainingJob(
        settings.head.kind,
        settings.head.config,
        settings.target,
        answers_folder(settings),
        stage_folder(settings),
        settings.train,
        settings.features,
        settings.engine,
        settings.optim,
        settings.schedule,
        settings.decode,
        settings.joint,
    )


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
        job.config,
        max_steps=steps,
        eval_every=0,
        save_every=0,
        parity=False,
        tracker=TrackerConfig(wandb="disabled"),
    )
    train(
        job.kind,
        job.head,
        target=job.target,
        data=job.data,
        out=folder,
        config=config,
        features=job.features,
        engine=job.engine,
        optim=job.optim,
        schedule=job.schedule,
        decode=job.decode,
        joint=job.joint,
    )
    found = read_summary(folder)
    # nothing was measured, one state written
    return found.model_copy(update={"seconds": {**found.seconds, "evaluation": 0.0, "saving": 0.0}})
