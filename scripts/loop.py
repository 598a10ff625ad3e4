"""`headstart loop`: generate, train every recipe, measure, report. Each stage skips what is complete, so a loop can be repeated.

With `loop.rounds` one drafter is trained in rounds that learn from its rejected drafts (scripts/rounds.py).

Every stage is composed from the loop's own command line, reduced to the groups that the stage reads; a recipe of `loop.recipes` is
put before the loop's experiments, whose values therefore win.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from heads.api.errors import UserError
from inference.folders import require_folder_name
from scripts.drafters import SWEPT
from scripts.rounds_config import BudgetConfig, RoundConfig
from scripts.stages import OPTION_GROUPS, RECIPE_GROUPS, STAGES, Stage

if TYPE_CHECKING:
    from scripts.config import Settings


@dataclass(frozen=True)
class SweepRow:
    """One drafter of a comparison, trained once per learning rate."""

    rates: tuple[float, ...]
    """Learning rates; the training with the best tau on the validation prompts stands for the row."""
    head: str = ""
    """Recipe of conf/head/; empty: the row's name."""
    overrides: tuple[str, ...] = ()
    """What this row sets besides, such as [head.num_layers=2]; values of the loop's own command line win."""

    def __post_init__(self) -> None:
        if not self.rates or min(self.rates) <= 0:
            raise UserError(
                f"loop.sweep.<row>.rates needs one or more learning rates above 0; given {self.rates}."
            )


@dataclass(frozen=True)
class LoopConfig:
    """What one turn of the loop consists of."""

    recipes: tuple[str, ...] = ()
    """Experiments (conf/experiment/) that train one drafter each; empty: the one drafter that the other groups describe."""
    sweep: dict[str, SweepRow] = field(default_factory=dict)
    """Drafters to compare, by name: each is trained at several learning rates and measured once, at its best one."""
    measures: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Measurements beside the main one: folder name -> overrides, for instance {sampled: [decode.temperature=1]}."""
    launch: str = ""
    """Command put before `headstart` for generate and train, for instance "torchrun --nproc-per-node 8 --no-python";
    empty: this process."""
    rounds: int = 0
    """Rounds of generate, feedback, train and measure, each from the drafter of the one before it; 0: one turn without feedback."""
    round: RoundConfig = field(default_factory=RoundConfig)
    """How a round goes."""
    budget: BudgetConfig = field(default_factory=BudgetConfig)
    """What the rounds may cost."""

    def __post_init__(self) -> None:
        for key in ("measures", "sweep"):
            for name in getattr(self, key):
                require_folder_name(f"loop.{key}", name)
        if self.rounds < 0:
            raise UserError(f"loop.rounds must not be negative; given: {self.rounds}.")
        if self.rounds and (self.sweep or len(self.recipes) > 1):
            raise UserError(
                f"loop.rounds={self.rounds} trains one drafter in rounds, but this loop trains {[*self.recipes, *self.sweep]}. "
                "Choose one with loop.recipes=[<recipe>], or leave the recipes out and choose head=<name>."
            )


@dataclass(frozen=True)
class Step:
    """One stage of the loop with its overrides."""

    stage: Stage
    overrides: list[str]
    title: str


def run(settings: Settings) -> None:
    """Run every step; a step that fails ends the loop, and repeating the command continues there."""
    steps = plan(settings)
    start = time.monotonic()
    if settings.loop.rounds:
        from scripts.rounds import run_rounds

        run_rounds(settings)
        steps = [step for step in steps if step.stage.name in ("measure", "report")]
    for number, step in enumerate(steps, 1):
        print(f"\n[{number}/{len(steps)}] {step.title}  ({clock(time.monotonic() - start)})", flush=True)
        perform(settings.loop.launch, step)
    print(f"\nloop finished in {clock(time.monotonic() - start)}", flush=True)


def perform(launch: str, step: Step) -> None:
    """Run a stage: behind the launcher where there is one and the stage can use it, else in this process."""
    if launch and step.stage.name in ("generate", "train"):
        launched(launch, step)
        require_complete(step)
    else:
        here(step)


def here(step: Step) -> None:
    """Run a stage in this process. The report at the end shows the tables, so measurements keep theirs to themselves."""
    from scripts.config import load_settings
    from scripts.measure import measured
    from scripts.runner import run_one

    settings = load_settings(step.stage, step.overrides)
    if step.stage.name == "measure":
        measured(settings)
    else:
        run_one(settings)


def plan(settings: Settings) -> list[Step]:
    """The steps of the loop, in order; raises `UserError` for overrides that cannot apply to several recipes."""
    recipes, given = settings.loop.recipes, settings.overrides
    for key in ("head", "run.drafter"):
        several = [*recipes, *settings.loop.sweep]
        if several and any(override_key(item) == key for item in given):
            raise UserError(
                f"{key} is given, but this loop trains the recipes {', '.join(several)}, each with its own. "
                f"Leave {key} out, or train one drafter with loop.recipes=[]."
            )
    common = recipes[0] if recipes else None
    steps = [Step(STAGES["generate"], stage_overrides(settings, "generate", common), "generate")]
    for recipe in recipes or ((None,) if not settings.loop.sweep else ()):
        title = f"train {recipe}" if recipe else "train"
        steps.append(Step(STAGES["train"], stage_overrides(settings, "train", recipe), title))
    steps += sweep_steps(settings, stage_overrides(settings, "train", common))
    main = stage_overrides(settings, "measure", common)
    steps.append(Step(STAGES["measure"], main, "measure"))
    for name, extra in settings.loop.measures.items():
        steps.append(Step(STAGES["measure"], [*main, f"measure.name={name}", *extra], f"measure {name}"))
    steps.append(Step(STAGES["report"], stage_overrides(settings, "report", common), "report"))
    return steps


def sweep_steps(settings: Settings, common: list[str]) -> list[Step]:
    """The trainings of `loop.sweep`: one per row and learning rate, named row@rate."""
    steps = []
    for name, row in settings.loop.sweep.items():
        for rate in row.rates:
            drafter = f"{name}{SWEPT}{rate:g}"
            own = [f"head={row.head or name}", *row.overrides, f"optim.lr={rate:g}"]
            steps.append(
                Step(STAGES["train"], [*own, *common, f"run.drafter='{drafter}'"], f"train {drafter}")
            )
    return steps


def stage_overrides(settings: Settings, name: str, recipe: str | None) -> list[str]:
    """The loop's overrides that stage `name` understands, with `recipe` put before the loop's experiments."""
    groups = STAGES[name].groups
    kept = []
    for item in settings.overrides:
        key = override_key(item)
        group = key.split(".")[0]
        reads = group in groups or (key in OPTION_GROUPS and key in RECIPE_GROUPS)
        if reads and key != "experiment":
            kept.append(item)
    chosen = settings.choices.get("experiment")
    own = [] if chosen is None else [chosen] if isinstance(chosen, str) else list(chosen)
    experiments = [*([recipe] if recipe else []), *own]
    return [*([f"experiment=[{','.join(experiments)}]"] if experiments else []), *kept]


def override_key(override: str) -> str:
    """The key of `key=value`, without the signs of Hydra's grammar."""
    return override.split("=", 1)[0].lstrip("+~")


def launched(prefix: str, step: Step) -> None:
    """Run a stage as a command of its own behind a launcher; raises `UserError` when it fails."""
    command = [*shlex.split(prefix), *headstart_command(), step.stage.name, *step.overrides]
    print(shlex.join(command), flush=True)
    try:
        status = subprocess.run(command, check=False).returncode
    except FileNotFoundError as error:
        raise UserError(f"loop.launch: '{command[0]}' is not a command here.") from error
    if status:
        raise UserError(
            f"'{step.title}' ended with status {status}; its own messages are above. Repeating the loop continues there."
        )


def require_complete(step: Step) -> None:
    """Raise `UserError` when a launched stage ended early: asked to stop (SIGTERM) it saves and ends without an error."""
    from scripts.config import load_settings
    from scripts.runner import is_complete

    if not is_complete(load_settings(step.stage, step.overrides)):
        raise UserError(
            f"'{step.title}' was stopped before it was complete. Repeating the loop continues there."
        )


def headstart_command() -> Sequence[str]:
    """The installed `headstart` beside this Python."""
    return [str(Path(sys.executable).with_name("headstart"))]


def clock(seconds: float) -> str:
    """Minutes and seconds, as 3:07."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
