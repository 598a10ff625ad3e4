"""Runs a stage: once, or once for every combination of listed values (`-m`). Imported only when
something runs."""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml

from heads.api.errors import UserError
from scripts.config.compose import parse
from scripts.config.schema import Settings, load_settings, read_settings
from scripts.config.stages import OPTION_GROUPS, Stage
from scripts.run.folder import read_record, stage_folder

INCOMPLETE = 3
"""Exit status of a stage that was asked whether it is complete, and is not."""


def run_stage(
    stage: Stage,
    overrides: Sequence[str],
    *,
    multirun: bool = False,
    show: bool = False,
    ask: bool = False,
    file: str = "",
) -> int:
    """Compose and run `stage`; returns the exit status, the worst of its runs.

    multirun: run every combination of listed values. show: only print what was composed. ask: only
    say whether it is complete. file: the settings, instead of overrides.
    """
    combinations = expand(overrides) if multirun else [list(overrides)]
    if file:
        jobs = [read_settings(stage, Path(file))]
    else:  # all are checked before the first one starts
        jobs = [load_settings(stage, combination) for combination in combinations]
    status = 0
    for number, settings in enumerate(jobs, 1):
        if len(jobs) > 1:
            print(
                f"[{number}/{len(jobs)}] headstart {stage.name} "
                f"{' '.join(combinations[number - 1])}",
                flush=True,
            )
        if show:
            yaml.safe_dump(settings.resolved, sys.stdout, sort_keys=False)
        elif ask:
            done = is_complete(settings)
            print(
                f"{output_folder(settings)} is {'complete' if done else 'not complete'}", flush=True
            )
            status = max(status, 0 if done else INCOMPLETE)
        else:
            status = max(status, run_one(settings))
    return status


def run_one(settings: Settings) -> int:
    """Run one stage with its settings in this process; returns its exit status (most stages have
    none but 0).

    Raises `UserError` for a target split over processes: a stage gives every process work of its
    own.
    """
    if (settings.resolved.get("target") or {}).get("tensor_parallel"):
        raise UserError(
            "target.tensor_parallel splits one target over the processes of a launch, but in "
            f"`headstart {settings.stage.name}` every process has work of its own. Decode with it "
            "from "
            "Python, under torchrun (docs/decoder.md, Targets)."
        )
    return int(importlib.import_module(settings.stage.module).run(settings) or 0)


def output_folder(settings: Settings) -> Path:
    """The folder that `generate` or `train` fills."""
    name = settings.stage.name
    return stage_folder(settings) if name == "train" else settings.run.directory / name


def is_complete(settings: Settings) -> bool:
    """Whether `generate` or `train` has nothing left to do: asked to stop by a signal they end
    without an error."""
    record = read_record(output_folder(settings))
    return record is not None and record.complete


def expand(overrides: Sequence[str]) -> list[list[str]]:
    """Every combination of the values listed in `overrides`, in order; each gets a drafter name of
    its own.

    `head=medusa,eagle3` needs no other name. Sweeping anything else names the drafter's folder
    after the values, so that two runs never share one.
    """
    parsed = parse(overrides)
    if not any(override.is_sweep_override() for override in parsed):
        raise UserError(
            "-m runs a stage for several values, but none are listed. Write for instance "
            "head=medusa,eagle3."
        )
    choices = []
    for override in parsed:
        if override.is_sweep_override():
            choices.append(
                [
                    f"{override.get_key_element()}={value}"
                    for value in override.sweep_string_iterator()
                ]
            )
        else:
            choices.append([override.input_line or ""])
    named = any(override.key_or_group == "run.drafter" for override in parsed)
    swept = [
        i
        for i, o in enumerate(parsed)
        if o.is_sweep_override() and o.key_or_group not in OPTION_GROUPS
    ]
    combinations = []
    for combination in itertools.product(*choices):
        job = list(combination)
        if swept and not named:
            values = [
                f"{parsed[i].key_or_group.split('.')[-1]}={job[i].split('=', 1)[1]}" for i in swept
            ]
            head = next((item.split("=", 1)[1] for item in job if item.startswith("head=")), None)
            job.append(
                f"run.drafter='{folder_name('-'.join([*([head] if head else []), *values]))}'"
            )
        combinations.append(job)
    return combinations


def folder_name(text: str) -> str:
    """`text` with everything that does not belong into a folder's name replaced."""
    return "".join(
        character if character.isalnum() or character in "-_.=" else "_" for character in text
    )
