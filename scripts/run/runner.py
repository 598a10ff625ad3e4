"""Runs a stage once, or once for every combination of listed values (`-m`). It is imported only
when a stage runs."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml

from heads.api.errors import UserError
from inference.writers import releasing
from scripts.config.compose import parse
from scripts.config.schema import Settings, load_settings, read_settings
from scripts.config.stages import Stage
from scripts.run.folder import answers_folder, read_record, stage_folder
from scripts.run.process import is_main_process, say_what_stays_embedded

INCOMPLETE = 3
"""Exit status of a stage that is asked whether it is complete and is not."""


class StoppedError(UserError):
    """A signal ended a step of a loop before it was complete."""


def run_stage(
    stage: Stage,
    overrides: Sequence[str],
    *,
    multirun: bool = False,
    show: str = "",
    ask: bool = False,
    file: str = "",
) -> int:
    """Compose and run `stage`; returns the exit status, the worst of its runs. multirun: run every
    combination of listed values. show: only print the settings: `all`, or those `changed` from the
    defaults. ask: only report whether it is complete. file: settings that replace the overrides."""
    if file:
        return act(read_settings(stage, Path(file)), show, ask)
    given = parse(overrides)
    if not multirun and not any(item.is_hydra_override() for item in given):
        return act(load_settings(stage, given), show, ask)
    sweep = importlib.import_module("scripts.run.sweep")
    if not show and not ask:
        status: int = sweep.run(stage, given, multirun)
        return status
    jobs = sweep.expand(stage, given) if multirun else [overrides]
    status = 0
    for number, job in enumerate(jobs, 1):
        if len(jobs) > 1:
            print(sweep.heading(stage, job, number, len(jobs)), flush=True)
        status = max(status, act(load_settings(stage, job), show, ask))
    return status


def act(settings: Settings, show: str, ask: bool) -> int:
    """Run a stage, print its settings, or report whether it is complete; returns the status."""
    if show:
        values = settings.with_defaults if show == "all" else settings.without_defaults
        yaml.safe_dump(values, sys.stdout, sort_keys=False)
        return 0
    if not ask:
        say_what_stays_embedded(settings)
        return run_one(settings)
    done = is_complete(settings)
    print(f"{output_folder(settings)} is {'complete' if done else 'not complete'}", flush=True)
    return 0 if done else INCOMPLETE


def run_one(settings: Settings) -> int:
    """Run one stage with its settings in this process; returns its exit status (most stages return
    only 0). Raises `UserError` for a target split over processes, because a stage gives every
    process separate work."""
    if (settings.resolved.get("target") or {}).get("tensor_parallel"):
        raise UserError(
            "target.tensor_parallel splits one target over the processes of a launch, but in "
            f"`headstart {settings.stage.name}` every process has work of its own. Decode with it "
            "from Python, under torchrun (docs/decoder.md, Targets)."
        )
    if settings.stage.alone and not is_main_process():
        return 0
    with releasing():
        return int(importlib.import_module(settings.stage.module).run(settings) or 0)


def output_folder(settings: Settings) -> Path:
    """The folder that a stage with a record writes."""
    name = settings.stage.name
    if name == "train":
        return stage_folder(settings)
    if name == "features":
        return settings.features.folder(answers_folder(settings))
    return settings.run.directory / (settings.measure.name if name == "measure" else name)


def is_complete(settings: Settings) -> bool:
    """Whether nothing is left to do. A stage that a signal stopped also ends without an error. A
    recorded stage also compares its settings and inputs with those of its folder."""
    record = read_record(output_folder(settings))
    if record is None or not record.complete:
        return False
    stage = settings.stage
    return not stage.recorded or bool(importlib.import_module(stage.module).is_complete(settings))
