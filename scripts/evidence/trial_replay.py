"""Comparisons on known answers, without a server: the verdict of a trial's test on two drafters
whose acceptances are drawn or resampled."""

from __future__ import annotations

from collections.abc import Sequence

from inference.server.trial import ArmAnswer, ArmState, TrialState
from train.learning.comparison import OPEN, TrialTest


def replay(
    test: TrialTest, current: Sequence[ArmAnswer], candidate: Sequence[ArmAnswer], step: int
) -> str:
    """The verdict of a fresh test that looks after every `step` answers of each drafter, until
    something is shown or one of them has no more answers."""
    for seen in range(step, min(len(current), len(candidate)) + 1, step):
        found = test.look(trial_of(current[:seen], candidate[:seen])).verdict
        if found != OPEN:
            return found
    return OPEN


def trial_of(current: Sequence[ArmAnswer], candidate: Sequence[ArmAnswer]) -> TrialState:
    """A trial with these answers, of which all passes are observed."""

    def arm(name: str, own: Sequence[ArmAnswer]) -> ArmState:
        accepted, passes = (sum(getattr(one, key) for one in own) for key in ("accepted", "passes"))
        return ArmState(name, len(own), passes, passes + accepted, accepted, tuple(own))

    most = max((one.passes for one in (*current, *candidate)), default=1)
    return TrialState(arm("current", current), arm("candidate", candidate), 0.5, most, 0)
