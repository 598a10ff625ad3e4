"""Fits of growth: parameters of known curves come back, the grid agrees with an exhaustive search,
and the form that made the points is chosen."""

from __future__ import annotations

import numpy as np
import pytest

from scripts.evidence.curves import FORMS, POWER, SATURATING, Form, between, choose, fit

SIZES = [1_000, 3_000, 10_000, 30_000]


def power(x: np.ndarray, scale: float, rate: float) -> np.ndarray:
    return scale * x**rate


def saturating(x: np.ndarray, limit: float, drop: float, rate: float) -> np.ndarray:
    return limit - drop * x**rate


@pytest.mark.parametrize(("scale", "rate"), [(0.2, 0.3), (3.0, 0.0), (5.0, -0.4), (1e-4, 1.3)])
def test_a_power_law_comes_back(scale: float, rate: float) -> None:
    x = np.array(SIZES, float)
    found = fit(POWER, SIZES, power(x, scale, rate))
    assert found.rate[0] == pytest.approx(rate, abs=1e-4)
    assert found.scale[0] == pytest.approx(scale, rel=1e-3)
    assert found.limit[0] == 0
    assert found.at(60_000.0)[0] == pytest.approx(power(np.array(60_000.0), scale, rate), rel=1e-3)


@pytest.mark.parametrize(("limit", "drop", "rate"), [(2.5, 20.0, -0.5), (4.0, 3.0, -0.1)])
def test_a_saturating_curve_comes_back(limit: float, drop: float, rate: float) -> None:
    x = np.array(SIZES, float)
    found = fit(SATURATING, SIZES, saturating(x, limit, drop, rate))
    assert found.rate[0] == pytest.approx(rate, abs=1e-3)
    assert found.limit[0] == pytest.approx(limit, rel=1e-2)
    assert found.scale[0] == pytest.approx(-drop, rel=1e-2)
    assert found.error[0] < 1e-9


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_no_other_rate_is_better(form: Form) -> None:
    """Against every rate of a fine grid, the other parameters by numpy's own least squares."""
    x, random = np.array(SIZES, float), np.random.default_rng(3)
    for _ in range(5):
        y = np.sort(random.uniform(0.5, 3.0, len(x)))
        errors = []
        for rate in np.linspace(*form.rates, 3001):
            columns = [x**rate] + [np.ones_like(x)] * form.limited
            _, left, rank, _ = np.linalg.lstsq(np.stack(columns, 1), y, rcond=None)
            if rank == len(columns):
                errors.append(float(left[0]))
        assert fit(form, SIZES, y).error[0] <= min(errors) * (1 + 1e-6)


def test_many_curves_are_fitted_as_each_alone() -> None:
    random = np.random.default_rng(0)
    y = np.sort(random.uniform(0.5, 3.0, (7, len(SIZES))), axis=1)
    for form in FORMS:
        together = fit(form, SIZES, y)
        alone = [fit(form, SIZES, row) for row in y]
        for name in ("limit", "scale", "rate", "error"):
            each = [getattr(one, name)[0] for one in alone]
            np.testing.assert_allclose(getattr(together, name), each)


def test_falling_points_are_no_growth_towards_a_limit() -> None:
    found = fit(SATURATING, SIZES, [3.0, 2.0, 1.5, 1.0])
    assert found.scale[0] == 0
    assert found.limit[0] == pytest.approx(np.mean([3.0, 2.0, 1.5, 1.0]))


def test_where_measured_points_reach_a_value() -> None:
    x = np.array(SIZES, float)
    exact = power(x, 0.2, 0.3)
    for amount in (2_000.0, 7_000.0, x[0] / 3, x[-1] * 4):  # between the points and beyond them
        found = between(SIZES, exact, 0.2 * amount**0.3)
        assert found[0] == pytest.approx(amount)
    # a slower and a faster resample, each with its own wish
    both = np.stack([exact, 2 * exact])
    found = between(SIZES, both, [exact[1], exact[1]])
    assert found[0] == pytest.approx(x[1]) and found[1] < x[0]
    # every measured point is its own place, whatever form the points have
    points = [1.0, 1.9, 2.0, 2.6]
    assert [between(SIZES, points, y)[0] for y in points] == pytest.approx(SIZES)


def test_points_that_fall_count_as_level() -> None:
    assert between([1, 10, 100], [1.0, 2.0, 1.5], 2.0)[0] == pytest.approx(10)
    assert between([1, 10, 100], [1.0, 2.0, 1.5], 2.1)[0] == np.inf
    assert between([1, 10, 100], [2.0, 2.0, 3.0], 1.9)[0] == 0
    assert between([1, 10, 100], [2.0, 2.0, 2.0], 2.0)[0] == 1


@pytest.mark.parametrize("seed", range(3))
def test_the_form_that_made_the_points_is_chosen(seed: int) -> None:
    x, random = np.array([500, *SIZES, 100_000], float), np.random.default_rng(seed)
    noise = random.normal(0, 0.004, len(x))
    assert choose(list(x), list(power(x, 0.1, 0.3) + noise)) is POWER
    assert choose(list(x), list(saturating(x, 2.5, 40.0, -0.5) + noise)) is SATURATING


def test_too_few_points_for_a_limit_leave_the_power_law() -> None:
    x = np.array(SIZES[:3], float)
    assert choose(SIZES[:3], list(saturating(x, 2.5, 20.0, -0.5))) is POWER
    assert choose(SIZES[:2], [1.0, 2.0]) is POWER
