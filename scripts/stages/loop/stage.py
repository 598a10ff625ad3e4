"""`headstart loop`: generate, train every recipe, measure, report.

Each stage skips what is complete, so a loop can be repeated. With `loop.rounds` one drafter is
trained in rounds that learn from its rejected drafts (`scripts.stages.loop.rounds`).

Every stage is composed from the loop's own command line, reduced to the groups that the stage
reads; a recipe of `loop.recipes` is put before the loop's experiments, whose values therefore win.
"""

from __future__ import annotations

import time

from heads.api.errors import UserError
from scripts.config.schema import Settings
from scripts.run.drafters import SWEPT
from scripts.run.process import console
from scripts.stages.loop.progress import Forecast, clock
from scripts.stages.loop.rounds import Rounds
from scripts.stages.loop.steps import Step, perform


def run(settings: Settings) -> None:
    """Run every step; one that fails ends the loop, and the same command continues there."""
    steps = plan(settings)
    start = time.monotonic()
    if settings.loop.rounds:
        Rounds(settings).run()
        steps = [step for step in steps if step.stage.name in ("measure", "report")]
    forecast = Forecast.of(steps)
    for step in steps:
        forecast.show(step.title, console())
        begun = time.monotonic()
        perform(settings.loop.launch, step)
        forecast.finish(time.monotonic() - begun)
    print(f"\nloop finished in {clock(time.monotonic() - start)}", flush=True)


def plan(settings: Settings) -> list[Step]:
    """The steps in order; raises `UserError` for settings that cannot apply to several recipes."""
    loop = settings.loop
    several = [*loop.recipes, *loop.sweep]
    for key in ("head", "run.drafter"):
        if several and settings.given(key):
            raise UserError(
                f"{key} is given, but this loop trains the recipes {', '.join(several)}, each with "
                f"its own. Leave {key} out, or train one drafter with loop.recipes=[]."
            )
    common = loop.recipes[0] if loop.recipes else None
    steps = [Step("generate", settings.derive("generate", common))]
    for recipe in loop.recipes or ((None,) if not loop.sweep else ()):
        title = f"train {recipe}" if recipe else "train"
        steps.append(Step(title, settings.derive("train", recipe)))
    steps += sweep_steps(settings, common)
    steps.append(Step("measure", settings.derive("measure", common)))
    for name, extra in loop.measures.items():
        more = [f"measure.name={name}", *extra]
        steps.append(Step(f"measure {name}", settings.derive("measure", common, more=more)))
    steps.append(Step("report", settings.derive("report", common)))
    return steps


def sweep_steps(settings: Settings, common: str | None) -> list[Step]:
    """The trainings of `loop.sweep`: one per row and learning rate, named row@rate."""
    steps = []
    for name, row in settings.loop.sweep.items():
        for rate in row.rates:
            drafter = f"{name}{SWEPT}{rate:g}"
            own = [f"head={row.head or name}", *row.overrides, f"optim.lr={rate:g}"]
            more = [f"run.drafter='{drafter}'"]
            found = settings.derive("train", common, before=own, more=more)
            steps.append(Step(f"train {drafter}", found))
    return steps
