"""`headstart train --plan`: predicts memory, disk and hours of a training, and writes them to
<run>/plan/<drafter>.json.

    headstart train --plan experiment=llama31_8b_eagle3 plan.gpu=h100 \
        plan.count=8 plan.tokens=200000000

Without `plan.gpu` and `plan.measured`, a few real steps are taken here, which needs the target and
the answers. If there are no answers yet, the time is derived from a matrix product. The amount of
training data is an upper bound until answers are packed, and the plan says so.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console

from inference.manifest import MANIFEST_FILE, write_json
from inference.target.loading import AUTO, checked_config
from inference.target.memory import gib
from inference.writers import only_writer
from scripts.config.schema import Settings
from scripts.run.process import console, prepare_process, shown
from scripts.stages.train import job_of
from train.config import TrainingJob
from train.planning.amount import Amount, estimated_amount
from train.planning.fitting import ways_to_fit
from train.planning.plan import PlanConfig, Speed, known_amount, make_plan, refuse_unplanned
from train.planning.table import plan_table
from train.run import train
from train.tracking.summary import Summary, read_summary
from train.tracking.tracker import TrackerConfig


def run(settings: Settings) -> None:
    """Plan, write the plan, and show it. If these settings do not fit, show settings that would."""
    prepare_process(settings.run)
    job, config = job_of(settings), settings.plan
    refuse_unplanned(job)  # before steps are measured for the plan
    if config.gpu and job.target.dtype == AUTO:  # the dtype of the planned machine
        job = replace(job, target=replace(job.target, dtype="bfloat16"))
    expected = None if known_amount(job, config) else expected_amount(settings, job)
    if expected:
        config = replace(config, tokens=expected.tokens)
    speed = speed_of(job, config)
    content = make_plan(job, config, speed)
    if expected:
        content["tokens_source"] = expected.source
    path = settings.run.directory / "plan" / f"{job.out.name}.json"
    with only_writer(path.parent, f".{job.out.name}.writer.json"):
        write_json(path, content)
    screen = console()
    screen.print(plan_table(content))
    if content["fits"] is False:
        show_ways(job, config, speed, screen)
    untouched = "; the target was not loaded for this" if config.gpu else ""
    print(f"written to {shown(path)}{untouched}")


def expected_amount(settings: Settings, job: TrainingJob) -> Amount:
    """The expected amount of training data, before anything was generated."""
    data, longest = settings.data, job.config.sequence_length
    described = checked_config(job.target).get_text_config()
    longest = min(longest, getattr(described, "max_position_embeddings", None) or longest)
    answer = settings.sampling.max_new_tokens
    return estimated_amount(data.path, data.limit or 0, answer, settings.plan.supervised, longest)


def show_ways(job: TrainingJob, config: PlanConfig, speed: Speed, screen: Console) -> None:
    """Print the settings that would fit."""
    screen.print("looking for settings that fit ...")
    fitting, closest = ways_to_fit(job, config, speed)
    lines = [f"  {words}  ({gib(count)})" for words, count in fitting]
    if lines:
        lines.insert(0, "It fits with any one of these lines of settings:")
        screen.print("\n".join(lines), soft_wrap=True, highlight=False)
    elif closest:
        words, count = closest
        screen.print(f"Nothing that was tried fits; the closest is {words} ({gib(count)}).")


def speed_of(job: TrainingJob, config: PlanConfig) -> Speed:
    """The expected speed: from a run's summary, a GPU's figures, or real steps taken now; without
    answers for such steps, from a matrix product on this machine."""
    if config.measured:
        return Speed.read(read_summary(config.measured), config.measured, config.gpu)
    if config.gpu:
        return Speed.of(config)
    if not (job.data / MANIFEST_FILE).is_file():
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return Speed.here(device, job.engine, config.mfu)
    return Speed.read(few_steps(job, config.steps), f"{config.steps} steps here")


def few_steps(job: TrainingJob, steps: int) -> Summary:
    """The summary of a few real training steps, which are not kept."""
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
    # nothing was measured, and one state was written
    return found.model_copy(update={"seconds": {**found.seconds, "evaluation": 0.0, "saving": 0.0}})
