"""The sequential test: silent while nothing changes, loud soon after a loss, never fooled by small
samples."""

from __future__ import annotations

from math import exp

import numpy as np
import pytest

from inference.staleness.evidence import Bets, Grid, RatioEvidence, Sums, ratio, shift_below
from inference.staleness.sequential_test import (
    ALARM,
    FINE,
    OPEN,
    OVERALL,
    DriftTest,
    fallen,
    ratio_interval,
    risen,
)
from tests.inference.staleness.answers import DEPTH, MOST, acceptance, draw

GRID = Grid(DEPTH)
CHANCES = {"code": 0.55, "prose": 0.4}


def make(
    reference: dict[str, list[tuple[int, int]]], tolerance: float = 0.05, alarm_rate: float = 0.01
) -> DriftTest:
    known: dict[str, RatioEvidence] = {
        name: Bets(GRID, MOST, answers) for name, answers in reference.items()
    }
    return DriftTest(GRID, MOST, known, tolerance, alarm_rate)


def stream(
    rng: np.random.Generator, factor: float, count: int
) -> list[tuple[str, tuple[int, int]]]:
    """`count` fresh answers of both domains, drafts kept `factor` times as often as they were."""
    domains = [name for _ in range(count) for name in [rng.choice(list(CHANCES))]]
    return [(str(name), draw(rng, factor * CHANCES[str(name)], 1)[0]) for name in domains]


def test_the_smallest_product_over_all_references_counts() -> None:
    """Against the slow way: every possible reference on a fine scale, its two e-values, the
    smallest product."""
    rng = np.random.default_rng(0)
    before, after = draw(rng, 0.6, 60), draw(rng, 0.35, 40)
    known, fresh, shift = Bets(GRID, MOST, before), Bets(GRID, MOST, after), shift_below(0.95)
    above = np.interp(np.log(GRID.values), np.log(GRID.values), known.above()[:-1])
    products = []
    for place in range(-shift, len(GRID.values)):
        products.append(above[place] + fresh.below()[1 + place + shift])
    slow = min(products)
    assert fallen(known, fresh, shift) <= slow + 1e-9  # taken at the careful end of every cell
    assert fallen(known, fresh, shift) > slow - 2.0
    assert fallen(known, known, shift) < 0.0 and risen(known, known, 0) < 0.0


def test_an_unchanged_drafter_hardly_ever_raises_an_alarm_however_often_one_looks() -> None:
    rng = np.random.default_rng(1)
    pools = {name: draw(rng, chance, 1500) for name, chance in CHANCES.items()}
    alarms = 0
    for _ in range(100):
        known = {
            name: [pool[i] for i in rng.integers(0, len(pool), 60)] for name, pool in pools.items()
        }
        test = make(known, tolerance=0.01, alarm_rate=0.2)
        for _ in range(60):
            name = str(rng.choice(list(pools)))
            test.add(name, *pools[name][rng.integers(0, len(pools[name]))])
        alarms += bool(test.alarms)
    # at a tolerance of next to nothing and a generous rate; the bound is still not reached
    assert alarms <= 0.2 * 100


def test_a_loss_is_found_soon_and_its_size_is_within_the_interval() -> None:
    rng = np.random.default_rng(2)
    seen = []
    for _ in range(6):
        reference = {name: draw(rng, chance, 150) for name, chance in CHANCES.items()}
        test = make(reference)
        looks = 0
        for name, counts in stream(rng, 0.6, 200):
            test.add(name, *counts)
            looks += 1
            if test.alarms:
                break
        seen.append(looks)
        assert test.alarms, "not within 200 answers"
        for name, change in test.changes().items():
            assert change.change < -0.2 and (change.verdict == ALARM) == (name in test.alarms)
    assert max(seen) < 200
    truth = acceptance(draw(rng, 0.6 * 0.55, 3000)) / acceptance(draw(rng, 0.55, 3000)) - 1.0
    for name, counts in stream(rng, 0.6, 300):
        test.add(name, *counts)
    bounds = test.changes()["code"].change_ci95
    assert bounds is not None and bounds[0] < truth < bounds[1] < -0.05


def test_a_small_reference_does_not_make_small_differences_large() -> None:
    """Eight answers that happened to be good are no proof that later ones are worse."""
    rng = np.random.default_rng(3)
    pool = sorted(draw(rng, 0.5, 200), key=lambda pair: pair[0] / max(1, pair[1]))
    test = make({"code": pool[-40::5]})
    for counts in draw(rng, 0.5, 300):
        test.add("code", *counts)
    assert test.changes()["code"].change < -0.05
    assert not test.alarms


def test_what_suits_is_called_fine_and_what_is_not_known_stays_open() -> None:
    rng = np.random.default_rng(4)
    test = make(
        {name: draw(rng, chance, 900, 0.05) for name, chance in CHANCES.items()}, tolerance=0.15
    )
    assert test.changes() == {}
    test.add("code", *draw(rng, 0.55, 1)[0])
    assert test.changes()["code"].verdict == OPEN
    for counts in draw(rng, 0.55, 900, 0.05):
        test.add("code", *counts)
    assert test.changes()["code"].verdict == FINE
    assert list(test.changes()) == ["code", OVERALL]


def test_domains_without_reference_are_counted_but_raise_no_alarm() -> None:
    rng = np.random.default_rng(5)
    test = make({"code": draw(rng, 0.5, 100)})
    for counts in draw(rng, 0.05, 150):
        test.add("poems", *counts)
    assert not test.alarms and not test.changes()
    assert test.unknown["poems"].answers == 150


def test_the_alarm_stays_and_all_domains_share_the_rate() -> None:
    rng = np.random.default_rng(6)
    one, two = (
        make({"code": draw(rng, 0.5, 100)}),
        make({n: draw(rng, c, 100) for n, c in CHANCES.items()}),
    )
    assert exp(two.needed) == pytest.approx(3 / 0.01) and exp(one.needed) == pytest.approx(2 / 0.01)
    for counts in draw(rng, 0.1, 60):
        one.add("code", *counts)
    assert "code" in one.alarms
    for counts in draw(rng, 0.8, 400):
        one.add("code", *counts)
    assert "code" in one.alarms and one.changes()["code"].verdict == ALARM


def test_domains_that_move_apart_share_no_ratio() -> None:
    rng = np.random.default_rng(7)
    test = make({name: draw(rng, chance, 400) for name, chance in CHANCES.items()})
    for name, factor in (("code", 0.3), ("prose", 1.6)):
        for counts in draw(rng, factor * CHANCES[name], 300):
            test.add(name, *counts)
    assert test.changes()[OVERALL].change_ci95 is None
    assert test.alarms[0] == "code"


def test_ratio_intervals_reach_to_the_ends_where_nothing_is_known() -> None:
    rng = np.random.default_rng(8)
    nothing = Bets(GRID, MOST)
    bounds = ratio_interval([(Bets(GRID, MOST, draw(rng, 0.5, 100)), nothing)], 0.05)
    assert bounds == (-1.0, float("inf"))
    same = ratio_interval(
        [(Bets(GRID, MOST, draw(rng, 0.5, 500)), Bets(GRID, MOST, draw(rng, 0.5, 500)))], 0.05
    )
    assert same is not None and -0.3 < same[0] < 0.0 < same[1] < 0.4
    assert ratio(0) == 1.0


def test_totals_are_looked_at_in_turn() -> None:
    known: dict[str, RatioEvidence] = {"": Sums(GRID, 2600.0, 2000.0, 5.0, 2000.0)}
    test = DriftTest(GRID, MOST, known, 0.05, 0.01)
    for passes in (100, 1000, 3000):
        test.replace("", Sums(GRID, 1.29 * passes, passes, 5.0, 2000.0))
    assert not test.alarms
    test.replace("", Sums(GRID, 0.9 * 6000, 6000, 5.0, 2000.0))
    assert test.alarms == ["", OVERALL]
    test.replace("new", Sums(GRID, 1.0, 9.0, 5.0, 2000.0))
    assert list(test.unknown) == ["new"]
