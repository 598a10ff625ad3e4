"""A step of the loop: one stage with its settings, run in this process or behind a launcher."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from heads.api.errors import UserError
from inference.measure.config import BenchConfig
from inference.target.loading import TargetConfig
from inference.target.model import TargetModel
from scripts.config.schema import Settings, write_settings
from scripts.config.stages import Stage
from scripts.run.process import prepare_process
from scripts.run.runner import StoppedError, is_complete, run_one
from scripts.stages import features
from scripts.stages.features import Head
from scripts.stages.generate import data_of, held_out_of
from scripts.stages.measure import measure_run

LAUNCHED = ("generate", "train")
"""Stages that share their work among the processes of a launch."""


@dataclass(frozen=True)
class Step:
    """One stage of the loop with its settings."""

    title: str
    settings: Settings
    heads: tuple[Head, ...] = ()
    """features: the heads that will be trained on them."""

    @property
    def stage(self) -> Stage:
        """The name of the stage."""
        return self.settings.stage


def derive_generation(settings: Settings, recipe: str | None, more: Sequence[str] = ()) -> Settings:
    """The generate stage of a loop (see `Settings.derive`). It does not read train.prompts, but
    holds out the prompts that the loop's command line gives there."""
    found, train = settings.derive("generate", recipe, more=more), settings.derive("train", recipe)
    if not train.given("train.prompts") or found.given("data.held_out"):
        return found
    return found.put(data=replace(found.data, held_out=train.train.prompts))


def derive_measurements(settings: Settings, recipe: str | None) -> list[Step]:
    """The measurements of a loop (see `Settings.derive`): of `loop.only`, or of all drafters of the
    run."""
    only = settings.loop.only
    before = [f"measure.drafters=[{','.join(only)}]"] if only else []
    steps = [Step("measure", settings.derive("measure", recipe, before=before))]
    for name, extra in settings.loop.measures.items():
        more = [f"measure.name={name}", *extra]
        found = settings.derive("measure", recipe, before=before, more=more)
        steps.append(Step(f"measure {name}", found))
    return steps


def hold_out_benches(settings: Settings, benches: Sequence[BenchConfig]) -> Settings:
    """The settings of a generate stage that holds out the prompts on which the loop measures.
    benches: of its measurements; one without prompts of its own measures on prompts that are held
    out in any case."""
    known = data_of(settings).held_out_prompts
    found = [held_out_of(one) for one in benches if one.prompts]
    more = dict.fromkeys(one for one in found if one not in known)
    if not more or settings.data.decontaminate == "none":
        return settings
    data = settings.data
    return settings.put(data=replace(data, held_out_prompts=(*data.held_out_prompts, *more)))


def perform(
    launch: str, step: Step, load_target: Callable[[TargetConfig], TargetModel] = TargetModel.load
) -> None:
    """Run a stage: behind the launcher if there is one and the stage supports it, otherwise in this
    process. A measurement prints no table here, because the report at the end of the loop shows all
    of them. load_target: for measurements, which may share a loaded target. Raises `StoppedError`
    after a scheduler's signal, for which the stage alone would end with status 0."""
    stopped = StoppedError(
        f"'{step.title}' was stopped before it was complete. Repeating the loop continues there."
    )
    try:
        if launch and step.stage.name in LAUNCHED:
            launch_step(launch, step)
            # after a signal, a stage saves and ends without an error
            if not is_complete(step.settings):
                raise stopped
        elif step.stage.name == "features":
            prepare_process(step.settings.run)
            features.write(step.settings, step.heads)
        elif step.stage.name == "measure":
            measure_run(step.settings, load_target)
        else:
            run_one(step.settings)
    except SystemExit as leaving:
        if leaving.code:
            raise
        raise stopped from leaving


def launch_step(prefix: str, step: Step) -> None:
    """Run a stage as a separate command behind a launcher; raises `UserError` if it fails. The
    settings are written to <run>/launch/<stage>.yaml, which every process of the launch reads."""
    name, settings = step.stage.name, step.settings
    drafter = settings.run.drafter or str(settings.choices.get("head") or name)
    file = settings.run.directory / "launch" / f"{name}-{drafter}.yaml"
    write_settings(settings, file)
    program = Path(sys.executable).with_name("headstart")
    try:
        words = shlex.split(prefix)
    except ValueError as error:
        raise UserError(f"loop.launch cannot be split into words ({error}): {prefix}") from error
    command = [*words, str(program), name, "--config", str(file)]
    print(f"{shlex.join(command)}\n(as {shlex.join(settings.command)})", flush=True)
    try:
        status = subprocess.run(command, check=False).returncode
    except FileNotFoundError as error:
        raise UserError(f"loop.launch: '{command[0]}' is not a command here.") from error
    if status:
        raise UserError(
            f"'{step.title}' ended with status {status}; its own messages are above. Repeating the "
            "loop continues there."
        )
