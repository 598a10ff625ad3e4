"""Rounds where prompts are few (conf/experiment/embedded_few_prompts.yaml), for docs/reports/loop.json: scripts/loop_report.py.

Both sides have the same 96 prompts and may train on as many tokens as two passes over the answers to all 1,440 take: the open loop
sees each of its answers thirty times, in the rounds the target writes further prompts itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from scripts.config import load_settings
from scripts.loop_comparison import LOOP, OPEN
from scripts.rounds import Rounds
from scripts.runner import run_one
from scripts.stages import STAGES

RECIPE = "experiment=embedded_few_prompts"
OPEN_STEPS = 122
"""As the open-loop trainings of experiment=families."""


def play_few(overrides: Sequence[str], work: Path) -> Path:
    """Play the rounds and the open-loop training of a kind in `work`; returns the open-loop training's folder. What has been played
    is left alone.
    """
    place = [f"run.root={work}", "run.threads=1"]
    Rounds(load_settings(STAGES["loop"], [RECIPE, *overrides, *place, f"run.name={LOOP}"])).run()
    answers = work / LOOP / "round-0" / "generate"  # greedy and without a drafter: what an open loop begins with too
    steps = f"train.max_steps={OPEN_STEPS}"
    own = [*place, f"run.name={OPEN}", f"run.drafter={OPEN}", f"run.answers={answers}", steps]
    run_one(load_settings(STAGES["train"], [RECIPE, *overrides, *own]))
    return opened(work)


def opened(work: Path) -> Path:
    """Where the open-loop training of `play_few` lies."""
    return work / OPEN / "train" / OPEN
