"""`headstart train`: trains one drafter on the responses of a run and keeps it at its best measured
tau.

Writes <run>/train/<drafter>/ with the drafter in best/.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from heads.api.checkpoint import weights_file
from inference.manifest import MANIFEST_FILE
from scripts.config.schema import Settings
from scripts.run.folder import (
    answers_folder,
    is_done,
    open_folder,
    require_answers,
    stage_folder,
    with_later,
)
from scripts.run.process import prepare_process, say, shown
from scripts.run.prompts import prompt_files
from train.config import TrainingJob
from train.data.answers import held_out_prompts
from train.run import train

WEIGHTS = "*.safetensors"


def run(settings: Settings) -> None:
    """Train, continuing an interrupted folder; a complete one is left unchanged."""
    require_answers(settings)
    job = job_of(settings)
    folder = open_folder(settings, job.out, inputs_of(settings, job))
    if folder.skip():
        return
    prepare_process(settings.run)
    manifest = train(**vars(job), provenance=folder.session)
    folder.finish()
    say(summary(manifest, job.out))


def is_complete(settings: Settings) -> bool:
    """Whether the training is complete and of these settings and inputs."""
    job = job_of(settings)
    return is_done(settings, job.out, inputs_of(settings, job))


def inputs_of(settings: Settings, job: TrainingJob) -> list[Path]:
    """The input files of the training: the answers, the weights that it starts from or learns
    beside, and the prompts that tau is measured on."""
    start, base = job.config.refresh, weights_file(Path(job.config.refresh.init_from))
    begins = [base] if start.init_from and base.is_file() else []
    # a manifest among the inputs stands for a folder of answers (`drafters.answers_of`)
    prompts = [file for file in prompt_files(*job.config.prompts) if file.name != MANIFEST_FILE]
    former = [job.data / MANIFEST_FILE, *(begins if start.adapter else [])]
    # a model's weights may be in several files
    folders = [getattr(job.head, name, "") for name in ("from_model", "reference")]
    sources = [file for each in folders if each for file in sorted(Path(each).glob(WEIGHTS))]
    return with_later(settings, job.out, former, [*begins, *sources, *prompts])


def job_of(settings: Settings) -> TrainingJob:
    """The training that the settings describe, with its answers' folder. Prompts that were held out
    of these answers' data take precedence over those of recipes and options."""
    answers, out, config = answers_folder(settings), stage_folder(settings), settings.train
    if not settings.given("train.prompts") and held_out_prompts(answers, "validation"):
        config = replace(config, prompts=())
    tracker = replace(
        config.tracker,
        name=config.tracker.name or f"{settings.run.name}/{out.name}",
        group=config.tracker.group or settings.run.name,
    )
    return TrainingJob(
        settings.head.kind,
        settings.head.config,
        settings.target,
        answers,
        out,
        replace(config, tracker=tracker),
        settings.features,
        settings.engine,
        settings.optim,
        settings.schedule,
        settings.decode,
        settings.joint,
    )


def summary(manifest: Mapping[str, Any], out: Path) -> str:
    """One line: steps, best tau, folder; for a joint training also the target's drift."""
    best, tau = manifest["best"], "tau was not measured"
    if best["tau"] is not None:
        low, high = best["tau_ci95"]
        tau = f"best tau {best['tau']:.2f} [{low:.2f}, {high:.2f}] at step {best['step']}"
    place = shown(out / manifest["checkpoint"])
    line = f"{manifest['kind']}: {manifest['steps']} steps, {tau}; {place}"
    if "joint" not in manifest:
        return line
    drift, target = manifest["joint"]["drift"], shown(out / manifest["joint"]["target"])
    return (
        f"{line}\nThe drafter belongs to a NEW target: {target}. It has moved from the original by "
        f"KL {drift['kl']:.4f} per token; {drift['agreement']:.1%} of tokens and "
        f"{drift['identical']:.1%} of greedy answers are as before. Measure with target.path set "
        "to it, and the same target=<option>."
    )
