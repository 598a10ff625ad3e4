"""Comparing a candidate within a server: false swaps stay below the error rate, true gains are
found."""

from __future__ import annotations

from math import log

import numpy as np
import pytest

from inference.server.trial import ArmAnswer, ArmState, TrialState
from train.learning.comparison import BETTER, OPEN, WORSE, TrialTest, needed_evidence

DEPTH, MOST = 3, 12


def answers(rng: np.random.Generator, means: np.ndarray) -> tuple[ArmAnswer, ...]:
    """An answer for each mean acceptance, which varies from answer to answer as texts do."""
    own = np.clip(rng.normal(means, 0.4), 0.05, DEPTH - 0.05)
    passes = rng.integers(MOST // 2, MOST + 1, len(means))
    accepted = rng.binomial(DEPTH * passes, own / DEPTH)
    return tuple(ArmAnswer("d", int(a), int(n)) for a, n in zip(accepted, passes, strict=True))


def trial(current: tuple[ArmAnswer, ...], candidate: tuple[ArmAnswer, ...]) -> TrialState:
    def arm(name: str, own: tuple[ArmAnswer, ...]) -> ArmState:
        accepted, passes = (sum(getattr(one, key) for one in own) for key in ("accepted", "passes"))
        return ArmState(name, len(own), passes, passes + accepted, accepted, own)

    return TrialState(arm("current", current), arm("candidate", candidate), 0.5, MOST, DEPTH)


def verdict(rng: np.random.Generator, gain: np.ndarray, level: np.ndarray) -> str:
    """Look after every tenth pair until something is shown or the traffic ends."""
    first, second = answers(rng, level), answers(rng, level * gain)
    test = TrialTest(needed_evidence(0.01, 1), DEPTH)
    for seen in range(10, len(level) + 1, 10):
        found = test.look(trial(first[:seen], second[:seen])).verdict
        if found != OPEN:
            return found
    return OPEN


def swaps_of_itself(count: int, length: int, drift: bool) -> list[str]:
    """Verdicts of comparisons of a drafter with itself. drift: acceptance of both changes along the
    traffic, as it does over a day."""
    rng, found, steps = np.random.default_rng(5), [], np.arange(length)
    for _ in range(count):
        turn = rng.uniform(0, 2 * np.pi)
        level = 1.0 + 0.6 * np.sin(steps / 40 + turn) if drift else np.ones(length)
        found.append(verdict(rng, np.ones(length), level))
    return found


def test_a_drafter_compared_with_itself_is_not_swapped() -> None:
    found = swaps_of_itself(40, 60, drift=True)
    assert found.count(BETTER) <= 1 and found.count(WORSE) <= 1


@pytest.mark.slow
@pytest.mark.parametrize("drift", [False, True])
def test_of_200_comparisons_of_a_drafter_with_itself_at_most_one_in_a_hundred_swaps(
    drift: bool,
) -> None:
    found = swaps_of_itself(200, 200, drift)
    assert found.count(BETTER) <= 2 and found.count(WORSE) <= 2


def test_a_better_candidate_is_found_and_a_worse_one_too() -> None:
    rng, level = np.random.default_rng(1), np.ones(400)
    assert [verdict(rng, 1.4 * level, level) for _ in range(8)].count(BETTER) >= 7
    assert [verdict(rng, 0.6 * level, level) for _ in range(8)].count(WORSE) >= 7


def test_the_thresholds_of_all_tries_together_spend_the_error_rate() -> None:
    spent = sum(np.exp(-needed_evidence(0.01, attempt)) for attempt in range(1, 60))
    assert spent == pytest.approx(0.01) and needed_evidence(0.01, 1) == pytest.approx(log(200))


def test_nothing_is_shown_before_the_first_answer() -> None:
    found = TrialTest(needed_evidence(0.01, 1), DEPTH).look(trial((), ()))
    assert (found.verdict, found.pairs) == (OPEN, 0)
