"""The figures of the report on learning: shares of tau, tau over time, cycles, false swaps."""

from __future__ import annotations

from typing import Any

import pytest

from scripts.evidence.learn_figures import (
    FROZEN,
    LEARNED,
    RETRAINED,
    cycles,
    over_time,
    shares,
    swaps_of_itself,
)
from scripts.evidence.served import Answer
from train.learning.journal import Entry


def arm(*committed: int) -> dict[str, Any]:
    """What a drafter does with a probe of ten passes for each number of committed tokens."""
    return {"committed": list(committed), "passes": [10] * len(committed)}


def test_the_shares_of_the_retrained_tau() -> None:
    arms = {FROZEN: arm(15, 15), LEARNED: arm(23, 23), RETRAINED: arm(25, 25)}
    found = shares(arms)
    assert [found[name]["tau"] for name in arms] == [1.5, 2.3, 2.5]
    assert found["by_retrained"] == pytest.approx(2.3 / 2.5)
    assert found["accepted_by_retrained"] == pytest.approx(1.3 / 1.5)
    assert found["regained"] == pytest.approx(0.8)
    assert found["regained_ci95"] == pytest.approx((0.8, 0.8))  # all probes are alike


def test_nothing_is_regained_where_a_training_from_scratch_is_not_better() -> None:
    frozen, retrained = arm(20, 30, 20, 30), arm(21, 29, 30, 20)
    arms = {FROZEN: frozen, LEARNED: arm(24, 24, 24, 26), RETRAINED: retrained}
    found = shares(arms)
    assert found["regained"] is None and found["by_retrained"] == pytest.approx(0.98)


def test_tau_over_time_is_of_the_same_requests() -> None:
    live = [Answer(4 * n + 3, 0.0, passes=10, committed=20 + n) for n in range(4)]
    arms = {FROZEN: arm(11, 13, 15, 17), RETRAINED: arm(30, 30, 40, 40)}
    assert over_time(live, arms, windows=2) == [
        {"through": 8, "learning": 2.05, FROZEN: 1.2, RETRAINED: 3.0},
        {"through": 16, "learning": 2.25, FROZEN: 1.6, RETRAINED: 4.0},
    ]


def test_the_journal_gives_cycles_and_what_they_cost() -> None:
    cost = {"tokens": 100, "seconds": 2.0}
    events: list[tuple[str, dict[str, Any]]] = [
        ("traffic", {"tokens": 7}),
        ("collected", {"tokens": 40}),
        ("trained", cost),
        ("swapped", {"checkpoint": "a"}),
        ("collected", {"tokens": 50}),
        ("trained", cost),
        ("rejected", {"why": "worse"}),
    ]
    found = cycles([Entry(n, 0.0, event, 1, facts) for n, (event, facts) in enumerate(events)])
    assert found == {
        "begun": 2,
        "swapped": 1,
        "rejected": ["worse"],
        "crashed": 0,
        "learnt_from_tokens": 90,
        "trainings": 2,
        "tokens": 200,
        "seconds": 4.0,
    }


def test_a_drafter_is_hardly_ever_swapped_for_itself() -> None:
    pool = {"observed": [[a, 10] for a in range(5, 26)] + [[0, 0]], "depth": 3}
    found = swaps_of_itself([pool], 30, pairs=80, clients=6)
    assert found["comparisons"] == 30 == found["swaps"] + found["found_worse"] + found["open"]
    assert found["swaps"] <= 1 and found["bound"] == 0.01
