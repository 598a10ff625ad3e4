"""Rounds where prompts are few (conf/experiment/embedded_few_prompts.yaml), for docs/reports/loop.json: scripts/loop_report.py.

Both sides have the same 96 prompts and may train on as many tokens as two passes over the answers to all 1,440 take: the open loop
sees each of its answers thirty times, in the rounds the target writes further prompts itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from scripts.config import Settings, load_settings
from scripts.loop_ablation import ablate, overrides, share_first_round
from scripts.loop_comparison import ABLATION, LOOP, OPEN
from scripts.rounds import Rounds
from scripts.rounds_plan import reads
from scripts.runner import run_one
from scripts.stages import STAGES

RECIPE = "experiment=embedded_few_prompts"
OPEN_STEPS = 122
"""As the open-loop trainings of experiment=families."""
MADE = 10
"""Prompts that variations and branches make per answer in the ablation: as many as the recipe's variations."""


def prompts() -> int:
    """How many prompts the recipe has."""
    limit = load_settings(STAGES["generate"], [RECIPE]).data.limit
    assert limit is not None, "the recipe is of few prompts"
    return limit


def other(seed: int) -> list[str]:
    """What makes a repetition: other prompts, as many, and another seed for everything that is drawn. 0: the recipe's own."""
    return ["data.shuffle=true", f"data.seed={seed}", f"run.seed={seed}"] if seed else []


def rounds_of(own: Sequence[str], work: Path, name: str, *more: str) -> Rounds:
    """The rounds of a kind, with its overrides `own`, in the run `name`."""
    place = [f"run.root={work}", f"run.name={name}", "run.threads=1"]
    return Rounds(load_settings(STAGES["loop"], [RECIPE, *own, *more, *place]))


def play_few(own: Sequence[str], work: Path) -> None:
    """Play the rounds and the open-loop training of a kind in `work`. What has been played is left alone."""
    rounds_of(own, work, LOOP).run()
    run_one(open_training(own, work))


def open_training(own: Sequence[str], work: Path) -> Settings:
    """The open loop's training, which goes through the first round's answers again and again."""
    answers = work / LOOP / "round-0" / "generate"  # greedy and without a drafter: what an open loop begins with too
    steps = f"train.max_steps={OPEN_STEPS}"
    place = [f"run.root={work}", f"run.name={OPEN}", f"run.drafter={OPEN}", f"run.answers={answers}", "run.threads=1", steps]
    return load_settings(STAGES["train"], [RECIPE, *(item for item in own if reads("train", item)), *place])


def ablate_few(own: Sequence[str], work: Path, switches: Sequence[str]) -> None:
    """Train a kind in `work` with every one of the switches alone, and with none (scripts/loop_ablation.py)."""
    share_first_round(work / LOOP, work / ABLATION)
    ablate(rounds_of(own, work, ABLATION, *overrides(MADE)), switches)


def opened(work: Path) -> Path:
    """Where the open-loop training of `play_few` lies."""
    return work / OPEN / "train" / OPEN
