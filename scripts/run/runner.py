"""Runs a stage: once, or once for every combination of listed values (`-m`). Imported only when
something runs."""

from __future__ import annotations

import importlib
import itertools
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml

from heads.api.errors import UserError
from scripts.config.compose import parse
from scripts.config.schema import Settings, load_settings, read_settings
from scripts.config.stages import OPTION_GROUPS, Stage
from scripts.run.folder import read_record, stage_folder
from scripts.run.process import is_main_process

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
    """Compose and run `stage`; returns the exit status, the worst of its runs. multirun: run every
    combination of listed values. show: only print what was composed. ask: only say whether it is
    complete. file: the settings, instead of overrides."""
    combinations = expand(overrides) if multirun else [list(overrides)]
    if file:
        jobs = [read_settings(stage, Path(file))]
    else:  # all are checked before the first one starts
        jobs = [load_settings(stage, combination) for combination in combinations]
    status = 0
    for number, (settings, combination) in enumerate(zip(jobs, combinations, strict=True), 1):
        if len(jobs) > 1:
            words = " ".join(combination)
            print(f"[{number}/{len(jobs)}] headstart {stage.name} {words}", flush=True)
        if show:
            yaml.safe_dump(settings.resolved, sys.stdout, sort_keys=False)
        elif ask:
            done = is_complete(settings)
            state = "complete" if done else "not complete"
            print(f"{output_folder(settings)} is {state}", flush=True)
            status = max(status, 0 if done else INCOMPLETE)
        else:
            status = max(status, run_one(settings))
    return status


def run_one(settings: Settings) -> int:
    """Run one stage with its settings in this process; returns its exit status (most stages have
    none but 0). Raises `UserError` for a target split over processes: a stage gives every process
    work of its own."""
    if (settings.resolved.get("target") or {}).get("tensor_parallel"):
        raise UserError(
            "target.tensor_parallel splits one target over the processes of a launch, but in "
            f"`headstart {settings.stage.name}` every process has work of its own. Decode with it "
            "from Python, under torchrun (docs/decoder.md, Targets)."
        )
    if settings.stage.alone and not is_main_process():
        return 0
    return int(importlib.import_module(settings.stage.module).run(settings) or 0)


def output_folder(settings: Settings) -> Path:
    name = settings.stage.name
    if name == "train":
        return stage_folder(settings)
    return settings.run.directory / (settings.measure.name if name == "measure" else name)


def is_complete(settings: Settings) -> bool:
    """Whether nothing is left to do: stopped by a signal, a stage ends without an error."""
    record = read_record(output_folder(settings))
    return record is not None and record.complete


def expand(overrides: Sequence[str]) -> list[list[str]]:
    """Every combination of the values listed in `overrides`, in order; each gets a drafter name of
    its own. `head=medusa,eagle3` needs no other name. Sweeping anything else names the drafter's
    folder after the values, so that two runs never share one."""
    parsed = parse(overrides)
    if not any(override.is_sweep_override() for override in parsed):
        raise UserError(
            "-m runs a stage for several values, but none are listed. Write for instance "
            "head=medusa,eagle3."
        )
    choices = [
        [f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()]
        if override.is_sweep_override()
        else [override.input_line or ""]
        for override in parsed
    ]
    keys = [override.key_or_group for override in parsed]
    swept = [
        place
        for place, override in enumerate(parsed)
        if override.is_sweep_override() and keys[place] not in OPTION_GROUPS
    ]
    combinations = [list(combination) for combination in itertools.product(*choices)]
    if swept and "run.drafter" not in keys:
        for job in combinations:
            values = [item.split("=", 1)[1] for item in job]
            name = [values[keys.index("head")]] if "head" in keys else []
            name += [f"{keys[place].split('.')[-1]}={values[place]}" for place in swept]
            folder = re.sub(r"[^\w.=-]", "_", "-".join(name))
            job.append(f"run.drafter='{folder}'")
    return combinations
