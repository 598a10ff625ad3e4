"""Is a candidate better than the drafter that serves? The test by betting of `headstart watch` on a
trial's answers.

An observation is an answer's acceptance x = a / n, the drafted tokens that its first n verify
passes accepted: every answer counts alike, however long it is. With r the mean of x over the
traffic for the drafter, q for the candidate, and the e-values of `inference.staleness.evidence`
(P = 1), the candidate is better once

    E = min over s of  below(s; drafter's answers) above(s; candidate's answers)  >=  1 / alpha.

For a candidate that is not better, q <= r, both factors are e-values at s = r, and so is their
product, since which drafter an answer gets is drawn independently of everything else. So P(E ever
reaches 1 / alpha) <= alpha, however often one looks (Ville's inequality). A trial that a restarted
server has lost begins anew; its k-th try has alpha = error_rate 2^-k, which together stay below
error_rate. The same with both exchanged shows that a candidate is worse.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log

from inference.server.trial import ArmState, TrialState
from inference.staleness.evidence import Bets, Grid
from inference.staleness.sequential_test import fallen, risen

BETTER, WORSE, OPEN = "better", "worse", "open"
"""Verdicts; `OPEN` after the last pair means that nothing was shown."""


@dataclass(frozen=True)
class Outcome:
    """What a trial shows so far. evidence, against: natural logarithms of the e-values that the
    candidate is better, and worse; needed: where one of them decides; pairs: answers of the arm
    that has fewer; acceptance: mean of drafter's and candidate's answers."""

    verdict: str
    evidence: float
    against: float
    needed: float
    pairs: int
    acceptance: tuple[float, float]


def needed_evidence(error_rate: float, attempt: int) -> float:
    """Logarithm of the e-value that decides the `attempt`-th try of a trial, from 1 on."""
    return log(2.0**attempt / error_rate)


class TrialTest:
    """The test of one trial, which is given the trial's state as it grows. needed: see `Outcome`;
    depth: of the trial."""

    def __init__(self, needed: float, depth: int) -> None:
        self.needed = needed
        grid = Grid(depth)
        self._current, self._candidate = Bets(grid, 1), Bets(grid, 1)

    def look(self, state: TrialState) -> Outcome:
        """Take the answers that are new since the last look, and say what is shown."""
        current, candidate = self._current, self._candidate
        add_new(current, state.current)
        add_new(candidate, state.candidate)
        better, worse = risen(current, candidate, 0), fallen(current, candidate, 0)
        verdict = BETTER if better >= self.needed else WORSE if worse >= self.needed else OPEN
        pairs = min(current.answers, candidate.answers)
        sums = (current.accepted, current.passes), (candidate.accepted, candidate.passes)
        before, after = (accepted / max(1.0, passes) for accepted, passes in sums)
        return Outcome(verdict, better, worse, self.needed, pairs, (before, after))


def add_new(bets: Bets, arm: ArmState) -> None:
    """Give the evidence of one drafter the answers that it does not have yet."""
    for one in arm.answers[bets.answers :]:
        bets.add(one.accepted / one.passes, 1)
