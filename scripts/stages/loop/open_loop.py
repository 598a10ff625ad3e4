"""What rounds are compared with (`loop.round.open_loop`): one training without feedback.

It takes as many tokens as all rounds had. Its answers are the target's to all prompts, generated
once, as a loop without rounds would; where the first round has answered these in the same way, they
are read. It is judged as the rounds are, and lies in <run>/open-loop/, a run of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from scripts.config.schema import Settings
from scripts.stages.loop import facts
from scripts.stages.loop.plan import RoundPlan, begin, place
from scripts.stages.loop.record import OpenLoopRecord, RoundRecord
from scripts.stages.loop.steps import Step

OPEN_LOOP = "open-loop"


def run_open_loop(
    plan: RoundPlan,
    rounds: Sequence[RoundRecord],
    best: int,
    perform: Callable[[Step], None],
    measure: Callable[[Settings], None],
) -> OpenLoopRecord:
    """Train it and compare it with the best round. What is complete is left alone."""
    folder = plan.settings.run.directory / OPEN_LOOP
    answers = answered_by_the_first_round(plan)
    if answers is None:
        answers = folder / "generate"
        generation = place(plan.settings.derive("generate", plan.recipe), folder)
        perform(Step("open loop: generate", generation))
    first = rounds[0].training
    assert first is not None, "every finished round has a training"
    tokens = sum(entry.spent.tokens for entry in rounds)
    training = begin(place(plan.settings.derive("train", plan.recipe), folder), "", False)
    perform(
        Step(
            "open loop: train",
            training.put(
                run=replace(training.run, answers=str(answers)),
                train=replace(
                    training.train, max_steps=max(1, round(tokens * first.steps / first.tokens))
                ),
            ),
        )
    )
    trained = folder / "train" / plan.drafter
    found = facts.trained(trained)
    measure(plan.judged(best, [found.checkpoint], folder))
    own, rival = (folder / "measure", plan.drafter), (plan.folder(best) / "measure", plan.drafter)
    return OpenLoopRecord(
        generated=facts.answered(answers),
        training=found,
        measured=facts.measured(*own),
        gain=facts.gained(rival, own),
        spent=facts.spent([folder / "generate", trained, folder / "measure"]),
    )


def answered_by_the_first_round(plan: RoundPlan) -> Path | None:
    """The first round's answers, if they are those of a loop without rounds: to all prompts, as
    asked."""
    loop = plan.settings.loop
    shared = loop.round.prompts == "share" and loop.rounds > 1
    return None if shared or plan.own("generate", 0) else plan.folder(0) / "generate"
