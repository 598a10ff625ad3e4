"""`headstart loop`: generate, train every recipe, measure, report.

Each stage skips complete work, so a loop can be repeated. With `run.answers` nothing is generated.
With `loop.rounds` one drafter is trained in rounds that learn from its rejected drafts
(`scripts.stages.loop.rounds`).

Every stage is composed from the loop's command line, reduced to the groups that the stage reads. A
recipe of `loop.recipes` is put before the loop's experiments, so the experiments' values win.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence

from heads.api.errors import UserError
from inference.target.model import TargetModel
from inference.writers import only_writer
from scripts.config.schema import Settings
from scripts.run import drafters
from scripts.run.drafters import SWEPT, list_trained
from scripts.run.folder import stage_folder
from scripts.run.process import console
from scripts.stages.loop.progress import Forecast, clock
from scripts.stages.loop.rounds import Rounds
from scripts.stages.loop.steps import (
    Step,
    derive_generation,
    derive_measurements,
    hold_out_benches,
    perform,
)
from scripts.stages.measure import require_measured


def run(settings: Settings) -> None:
    """Run every step. A step that fails ends the loop, and the same command continues there."""
    steps = plan(settings)
    with only_writer(settings.run.directory, ".loop.writer.json"):
        play(settings, steps)


def play(settings: Settings, steps: Sequence[Step]) -> None:
    """Run the rounds, if there are any, and the steps, with a progress display."""
    start = time.monotonic()
    if settings.loop.rounds:
        Rounds(settings).run()
        steps = [step for step in steps if step.stage.name in ("measure", "report")]
    forecast = Forecast.of(steps)
    # consecutive measurements share the loaded target and its compiled code
    load_target = functools.lru_cache(maxsize=1)(TargetModel.load)
    for step in steps:
        forecast.show(step.title, console())
        begun = time.monotonic()
        perform(settings.loop.launch, step, load_target)
        forecast.finish(time.monotonic() - begun)
    print(f"\nloop finished in {clock(time.monotonic() - start)}", flush=True)


def plan(settings: Settings) -> list[Step]:
    """The steps in order; raises `UserError` for settings that do not work with several recipes or
    with rounds."""
    loop = settings.loop
    if loop.rounds and settings.run.answers:
        raise UserError(
            f"run.answers={settings.run.answers} is given, but every round of loop.rounds has "
            "answers of its own. Leave out one of them."
        )
    several = [*loop.recipes, *loop.rows]
    for key in ("head", "run.drafter"):
        if several and settings.given(key):
            raise UserError(
                f"{key} is given, but this loop trains the recipes {', '.join(several)}, each with "
                f"its own. Leave {key} out, or train one drafter with loop.recipes=[]."
            )
    common = loop.recipes[0] if loop.recipes else None
    measures = derive_measurements(settings, common)
    benches = [step.settings.bench for step in measures]
    stored = loop.store_features and not settings.given("features")
    before = ["features=store"] if stored else []
    trainings = []
    for recipe in loop.recipes or ((None,) if not loop.rows else ()):
        title = f"train {recipe}" if recipe else "train"
        trainings.append(Step(title, derive_training(settings, recipe, before)))
    trainings += sweep_steps(settings, common, before)
    check_drafts(measures, trainings)
    steps = []
    if not settings.run.answers:
        generation = hold_out_benches(derive_generation(settings, common), benches)
        steps.append(Step("generate", generation))
    if loop.store_features:
        steps.append(features_step(settings, trainings))
    report = Step("report", settings.derive("report", common))
    return [*steps, *trainings, *measures, report]


def check_drafts(measures: Sequence[Step], trainings: Sequence[Step]) -> None:
    """Raise `UserError`, before anything is trained, if a measurement has a draft for a drafter
    that it will not measure."""
    trained = [stage_folder(step.settings).name.partition(SWEPT)[0] for step in trainings]
    for step in measures:
        config = step.settings.measure
        named = [name if name in trained else drafters.name_of(name) for name in config.drafters]
        own = named or [*trained, *list_trained(step.settings.run)]
        require_measured(config, [*dict.fromkeys(own), *config.kinds])


def features_step(settings: Settings, trainings: Sequence[Step]) -> Step:
    """The step that writes the features for all trainings that read a store (not those that rewrite
    their rows or chose features=online); raises `UserError` if they would not read the same one."""
    trainings = [step for step in trainings if step.settings.features.mode == "store"]
    trained = [step.settings for step in trainings]
    shared = {
        (str(item.features), item.train.sequence_length, item.engine.dtype) for item in trained
    }
    if len(shared) != 1:
        raise UserError(
            "loop.store_features writes one store for all trainings, which must have the same "
            "features.*, train.sequence_length and engine.precision, and features=store. Give them "
            "on the command line, or set loop.store_features=false."
        )
    own = settings.derive("features", settings.loop.recipes[0] if settings.loop.recipes else None)
    first = trained[0]
    found = own.put(features=first.features, train=first.train, engine=first.engine)
    heads = [
        (step.title, item.head.kind, item.head.config)
        for step, item in zip(trainings, trained, strict=True)
    ]
    return Step("features", found, tuple(heads))


def sweep_steps(settings: Settings, common: str | None, before: Sequence[str]) -> list[Step]:
    """The trainings of `loop.sweep`: one per row and learning rate, named row@rate."""
    steps = []
    for name, row in settings.loop.rows.items():
        for rate in row.rates:
            drafter = f"{name}{SWEPT}{rate:g}"
            own = [f"head={row.head or name}", *row.overrides, f"optim.lr={rate:g}"]
            more = [f"run.drafter='{drafter}'"]
            found = derive_training(settings, common, before, own, more)
            steps.append(Step(f"train {drafter}", found))
    return steps


def derive_training(
    settings: Settings,
    recipe: str | None,
    features: Sequence[str],
    before: Sequence[str] = (),
    more: Sequence[str] = (),
) -> Settings:
    """The settings of a training. features: the choice of the store, which is left out for a
    training that rewrites its rows (train.on_policy) and therefore computes its features itself."""
    found = settings.derive("train", recipe, before=[*features, *before], more=more)
    if features and rewrites(found):
        return settings.derive("train", recipe, before=before, more=more)
    return found


def rewrites(training: Settings) -> bool:
    return training.train.on_policy.share > 0
