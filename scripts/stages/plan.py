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
from inference.target.loading import AUTO
from scripts.config.schema import Settings
from scripts.run.process import prepare_process, shown
from scripts.stages.train import job_of
from train.config import TrainingJob
from train.planning.plan import PlanConfig, Speed, make_plan
from train.planning.table import plan_table
from train.run import train
from train.tracking.summary import Summary, read_summary
from train.tracking.tracker import TrackerConfig


def run(settings: Settings) -> None:
    prepare_process(settings.run)
    job = job_of(settings)
    if settings.plan.gpu and job.target.dtype == AUTO:  # that of the planned machine
        job = replace(job, target=replace(job.target, dtype="bfloat16"))
    content = make_plan(job, settings.plan, speed_of(job, settings.plan))
    path = settings.run.directory / "plan" / f"{job.out.name}.json"
    write_json(path, content)
    Console(soft_wrap=True).print(plan_table(content))
    untouched = "; the target was not loaded for this" if settings.plan.gpu else ""
    print(f"written to {shown(path)}{untouched}")


def speed_of(job: TrainingJob, config: PlanConfig) -> Speed:
    """How fast it will be: by a GPU's figures, a run's summary, or real steps taken now."""
    if config.gpu:
        return Speed.of(config)
    if config.measured:
        return Speed.read(read_summary(config.measured), config.measured)
    return Speed.read(few_steps(job, config.steps), f"{config.steps} steps here")


def few_steps(job: TrainingJob, steps: int) -> Summary:
    """The summary of a few real steps of the training, which are not kept."""
    config = replace(
        job.config,
        max_steps=steps,
        eval_every=0,
        save_every=0,
        parity=False,
        tracker=TrackerConfig(wandb="disabled"),
    )
    with tempfile.TemporaryDirectory(prefix="headstart-plan-") as folder:
        train(**vars(replace(job, config=config, out=Path(folder))))
        found = read_summary(folder)
    # nothing was measured, one state written
    return found.model_copy(update={"seconds": {**found.seconds, "evaluation": 0.0, "saving": 0.0}})
