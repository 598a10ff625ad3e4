"""The test whether a candidate is better than the drafter that serves: the test by betting of
`headstart watch` on a trial's answers.

An observation is an answer's acceptance x = a / n, with a the drafted tokens that its first n
verify passes accepted; every answer has the same weight, however long it is. With r the mean of x
over the traffic for the drafter, q for the candidate, and the e-values of
`inference.staleness.evidence` (P = 1), the candidate is better once

    E = min over s of  below(s; drafter's answers) above(s; candidate's answers)  >=  1 / alpha.

For a candidate that is not better, q <= r, both factors are e-values at s = r. So is their product,
because the drafter of an answer is drawn independently of everything else. So P(E ever reaches 1 /
alpha) <= alpha, however often the learner looks (Ville's inequality). A trial that a restarted
server has lost begins anew; its k-th try has alpha = error_rate 2^-k, which together stay below
error_rate. The same test with both exchanged shows that a candidate is worse.

No client decides alone. With k_i the answers of client i in an arm, the first min(k_i, c) of them
count, c being the largest number with which no client exceeds its share of either arm
(`train.learning.traffic.client_limit`); the others wait, and count once c has grown. An answer that
has counted stays: when a second client's first answer arrives, the first client's answers are not
taken back.

The argument holds with this limit, because neither the choice of the drafter nor the choice of the
answers that count depends on acceptance. The arm is drawn under a key that no client knows
(`inference.server.trial`), and which answers count follows only from the clients of all answers.
Given these clients, with r_t and q_t the means of the answers that count, and r and q their
averages over all answers that have counted so far,

    E[below(s)] <= mean over c of prod over t of 1 - c (r_t - s) / (D - s) <= 1  for s <= r,

by the inequality of arithmetic and geometric means, and E[above(s)] <= 1 for s >= q. So at every
look the chance that a candidate with q <= r has reached 1 / alpha is at most alpha (Markov). For
all looks together this is proven if clients are draws from one traffic. For limits that take effect
while clients differ, and for drifting traffic, the tests simulate it.

For a server that tries no candidates, both drafters decode the same held-out prompts (`paired`).
The turns of a conversation depend on one another, so a conversation is one observation. With d_t
the mean over the prompts of conversation t of the candidate's acceptance less the drafter's, and D
the depth, the mean over stakes c of prod over t of 1 + c d_t / D is an e-value for a candidate with
E[d] <= 0, since -D <= d_t <= D and conversations are independent. It is evaluated once.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import log

import numpy as np

from inference.server.trial import ArmAnswer, ArmState, TrialState
from inference.staleness.evidence import SHARES, Bets, Grid, log_mean
from inference.staleness.sequential_test import fallen, risen
from train.learning.traffic import client_limit

BETTER, WORSE, OPEN = "better", "worse", "open"
"""Verdicts; `OPEN` after the last pair means that nothing was shown."""


@dataclass(frozen=True)
class Outcome:
    """The result of a trial so far. evidence, against: natural logarithms of the e-values that the
    candidate is better, and worse; needed: the value at which one of them decides; pairs: answers
    that count, of the arm with fewer; answers: all answers, likewise; acceptance: mean of the
    drafter's and the candidate's answers that count."""

    verdict: str
    evidence: float
    against: float
    needed: float
    pairs: int
    answers: int
    acceptance: tuple[float, float]


def needed_evidence(error_rate: float, attempt: int) -> float:
    """Logarithm of the e-value that decides the `attempt`-th try of a trial, from 1 on."""
    return log(2.0**attempt / error_rate)


def conversations(prompts: Sequence[Sequence[int]]) -> list[int]:
    """The number of each prompt's conversation. Two prompts of which one begins with the other are
    turns of one, as the prompt of a turn begins with that of the turn before."""
    numbers, number, root = [0] * len(prompts), -1, list[int]()
    # what begins with a prompt follows it in this order, before anything else
    for place in sorted(range(len(prompts)), key=lambda one: tuple(prompts[one])):
        tokens = list(prompts[place])
        if number < 0 or tokens[: len(root)] != root:
            number, root = number + 1, tokens
        numbers[place] = number
    return numbers


def paired(
    before: Sequence[float],
    after: Sequence[float],
    depth: int,
    error_rate: float,
    units: Sequence[int] = (),
) -> Outcome:
    """The outcome of decoding the same N prompts with both drafters; see the module.

    before, after: accepted drafts per verification of each prompt [N], N >= 1, from 0 to `depth`,
    with the drafter and with the candidate; error_rate: chance of accepting a candidate that is not
    better; units: the conversation of each prompt [N], from 0 on without gaps; empty: every prompt
    is one. The bets are those of Waudby-Smith & Ramdas (2010.09686).
    """
    own = np.asarray(units if len(units) else range(len(before)))
    sizes = np.bincount(own)
    old, new = (np.bincount(own, np.asarray(one)) / sizes for one in (before, after))
    gains = (new - old) / depth
    better, worse = (
        float(log_mean(np.log1p(sign * SHARES[:, None] * gains).sum(1, keepdims=True))[0])
        for sign in (1.0, -1.0)
    )
    needed, count = -log(error_rate), len(gains)
    verdict = BETTER if better >= needed else WORSE if worse >= needed else OPEN
    means = float(np.mean(old)), float(np.mean(new))
    return Outcome(verdict, better, worse, needed, count, count, means)


class TrialTest:
    """The test of one trial, which gets the trial's growing state. needed: see `Outcome`; depth:
    of the trial; client_share: largest share of one client."""

    def __init__(self, needed: float, depth: int, client_share: float) -> None:
        self.needed, self.share = needed, client_share
        grid = Grid(depth)
        self._current, self._candidate = Arm(grid), Arm(grid)

    def look(self, state: TrialState) -> Outcome:
        """Take the answers that are new since the last look, and return what is shown."""
        arms = self._current, self._candidate
        for arm, own in zip(arms, (state.current, state.candidate), strict=True):
            arm.see(own)
        limit = min(arm.limit(self.share) for arm in arms)
        for arm in arms:
            arm.take(limit)
        current, candidate = (arm.bets for arm in arms)
        better, worse = risen(current, candidate, 0), fallen(current, candidate, 0)
        verdict = BETTER if better >= self.needed else WORSE if worse >= self.needed else OPEN
        pairs = min(current.answers, candidate.answers)
        seen = min(arm.seen for arm in arms)
        sums = (current.accepted, current.passes), (candidate.accepted, candidate.passes)
        before, after = (accepted / max(1.0, passes) for accepted, passes in sums)
        return Outcome(verdict, better, worse, self.needed, pairs, seen, (before, after))


class Arm:
    """The answers of one drafter: `seen` of them, `taken` of each client as evidence, the others
    waiting."""

    def __init__(self, grid: Grid) -> None:
        self.bets, self.seen = Bets(grid, 1), 0
        self.taken = Counter[int]()
        self._waiting: dict[int, deque[ArmAnswer]] = defaultdict(deque)

    def see(self, arm: ArmState) -> None:
        """Read the new answers."""
        for one in arm.answers[self.seen :]:
            self._waiting[one.client].append(one)
        self.seen = len(arm.answers)

    def limit(self, share: float) -> int:
        """The largest number of answers of one client."""
        counts = [self.taken[client] + len(own) for client, own in self._waiting.items()]
        return client_limit(counts, share, self.seen)

    def take(self, limit: int) -> None:
        """Count the first `limit` answers of every client."""
        for client, own in self._waiting.items():
            while own and self.taken[client] < limit:
                one = own.popleft()
                self.bets.add(one.accepted / one.passes, 1)
                self.taken[client] += 1
