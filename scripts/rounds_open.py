"""What rounds are compared with (`loop.round.open_loop`): a training without feedback, on as many tokens as all rounds had.

Its answers are the target's to all prompts, generated once, as a loop without rounds would; where the first round has answered
these in the same way, they are read. It is judged as the rounds are, and lies in <run>/open-loop/, a run of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scripts import rounds_facts as facts
from scripts.loop import Step, stage_overrides
from scripts.rounds_plan import RoundPlan, reads, text
from scripts.stages import STAGES

if TYPE_CHECKING:
    from scripts.config import Settings

OPEN_LOOP = "open-loop"


def open_loop(
    plan: RoundPlan,
    rounds: Sequence[Mapping[str, Any]],
    best: int,
    perform: Callable[[Step], None],
    measure: Callable[[Settings], None],
) -> dict[str, Any]:
    """Play it and return its entry in loop.json: `generated`, `training`, `measured`, `gain` (of the best round over it), `spent`.

    rounds: the entries of all rounds. What is complete is left alone.
    """
    folder = plan.settings.run.directory / OPEN_LOOP
    answers = answered_by_the_first_round(plan)
    if answers is None:
        answers = folder / "generate"
        perform(step(plan, "generate"))
    tokens, first = sum(entry["spent"]["tokens"] for entry in rounds), rounds[0]["training"]
    steps = max(1, round(tokens * first["steps"] / first["tokens"]))
    more = [f"run.answers={text(answers)}", f"train.max_steps={steps}", *plan.started("", False)]
    perform(step(plan, "train", *more))
    training = folder / "train" / plan.drafter
    found = facts.trained(training)
    place = [f"run.root={text(plan.settings.run.directory)}", f"run.name={OPEN_LOOP}"]
    measure(plan.judged(best, [found["checkpoint"]], place))
    own, rival = (folder / "measure", plan.drafter), (plan.folder(best) / "measure", plan.drafter)
    return {
        "generated": facts.answered(answers),
        "training": found,
        "measured": facts.measured(*own),
        "gain": facts.plain(facts.gained(rival, own)),
        "spent": facts.spent([folder / "generate", training, folder / "measure"]),
    }


def answered_by_the_first_round(plan: RoundPlan) -> Path | None:
    """The first round's answers, if they are what a loop without rounds would answer: all prompts, with the loop's own settings."""
    loop = plan.settings.loop
    shared = loop.round.prompts == "share" and loop.rounds > 1
    changed = any(reads("generate", item) for item in loop.round.own_overrides(0))
    return None if shared or changed else plan.folder(0) / "generate"


def step(plan: RoundPlan, stage: str, *more: str) -> Step:
    """A stage of the open loop: the loop's own settings, none of the rounds'."""
    place = [f"run.root={text(plan.settings.run.directory)}", f"run.name={OPEN_LOOP}"]
    return Step(STAGES[stage], [*stage_overrides(plan.settings, stage, plan.recipe), *more, *place], f"open loop: {stage}")
