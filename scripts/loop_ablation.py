"""Every switch of the rounds alone, for docs/reports/loop.json (scripts/loop_report.py): short trainings from one start.

The start is the drafter of a loop's first round; `none` trains it on the answers of the second round. A switch that weighs or
chooses trains on the same answers with its weights; one that says what is answered (`GENERATED`) adds its own answers to them. All
trainings have as many steps, and so as many tokens.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from heads.api.errors import UserError
from scripts.loop import Step
from scripts.rounds import GENERATED, HARD, ON_POLICY, Rounds, switched
from scripts.rounds_plan import HARD_PROMPTS, MORE, PLAIN, TRIALS
from train.feedback import build
from train.feedback.config import FeedbackConfig
from train.recording import RECORDS

FEEDBACK_SWITCHES = ("token_weights", "anchor_weights", "replay", "domain_weights")
"""The switches of `feedback` that weigh or choose."""
TRIED = (*FEEDBACK_SWITCHES, ON_POLICY, *GENERATED)
STEPS = 40
SHARED = ("round-0", "round-1/generate", "round-1/speed.json", *(f"round-1/{name}" for name in MORE))
"""What is the same in all rows of a kind, and played once."""


def overrides(made: float) -> list[str]:
    """Settings of the rounds that `ablate` takes. made: prompts that variations and branches make per answer."""
    on = [f"feedback.{name}=true" for name in FEEDBACK_SWITCHES]
    made_prompts = [f"feedback.{name}={made:g}" for name in MORE]
    return [*on, *made_prompts, f"feedback.{HARD}=0.25", f"loop.round.trial_steps={STEPS}"]


def share_first_round(source: Path, run: Path) -> None:
    """Take over what another run of the kind has played of `SHARED`."""
    for name in SHARED:
        if (source / name).exists() and not (run / name).exists():
            (run / name).parent.mkdir(parents=True, exist_ok=True)
            (run / name).symlink_to((source / name).resolve())


def ablate(rounds: Rounds, switches: Sequence[str]) -> None:
    """Train with none and with every one of `switches`; what has been played is left alone."""
    start = rounds.play(0)["training"]["checkpoint"]
    rounds.perform(rounds.plan.generation(1, start, True, None))
    folder = rounds.plan.folder(1) / TRIALS
    for name in (PLAIN, *switches):
        answers = learnt_from(rounds, name, folder / f"feedback-{name}")
        rounds.perform(rounds.plan.trial(1, name, answers, start, name == ON_POLICY))


def learnt_from(rounds: Rounds, name: str, out: Path) -> Path:
    """The answers that a trial trains on. (`Rounds.feedback` would read what other switches had answered, too.)"""
    own = rounds.plan.folder(1) / "generate"
    if name in FEEDBACK_SWITCHES:
        build([own / RECORDS], [own], out, switched(rounds.settings.feedback, [name]))
    elif name in GENERATED:
        build([], [own, answered(rounds, name, own)], out, FeedbackConfig())
    else:
        return own
    return out


def answered(rounds: Rounds, name: str, own: Path) -> Path:
    """The answers that a switch adds to those in `own`."""
    if name == HARD:
        answer_hard_prompts(rounds, own)
    elif not rounds.make(1, name, ""):
        raise UserError(f"'{rounds.plan.made_prompts(1, name)}' is empty: the answers of round 1 gave no {name}.")
    return rounds.plan.folder(1) / name / "generate"


def answer_hard_prompts(rounds: Rounds, own: Path) -> None:
    """Answer the hardest prompts of round 1 once more: what the next round would do, at the temperature of this one."""
    plan, made = rounds.plan, rounds.plan.made_prompts(1, HARD)
    chosen = made.parent / "feedback"
    build([own / RECORDS], [own], chosen, switched(rounds.settings.feedback, [HARD]))
    if not made.is_file():
        shutil.copyfile(chosen / HARD_PROMPTS, made)
    step = plan.answering_made(1, HARD, "")
    other = f"sampling.seed={plan.generate.sampling.seed + 2}"  # at a temperature, not the same answer again
    rounds.perform(Step(step.stage, [*step.overrides, other], step.title))


def merged(known: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    """Rows of the ablation found now, beside those of earlier calls where the training without any switch came to the same weights:
    only then do they have one start and one set of answers.
    """
    same = known.get(PLAIN, {}).get("weights_sha256") == found[PLAIN]["weights_sha256"]
    rows = {**(known if same else {}), **found}
    return {name: rows[name] for name in (PLAIN, *(name for name in TRIED if name in rows))}
