"""Fits how a quantity grows with an amount: two forms, by least squares, and values derived from
them.

    power        y = scale x^rate
    saturating   y = limit + scale x^rate, with rate and scale below 0: y approaches limit

For a given rate both forms are linear, so only the rate is searched (variable projection; Golub and
Pereyra, 1973), on a grid that narrows around the best rate. Many curves are fitted at once, such as
the resamples of a bootstrap.

Legend: R curves, N points of each, G rates that are tried.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from inference.measure.metrics import Floats

STEPS, CLOSER = 61, 4
"""Rates in a grid, and number of grids. Each grid covers two steps of the one before."""


@dataclass(frozen=True)
class Form:
    """A family of curves. rates: the smallest and the largest; limited: whether it has a limit."""

    name: str
    rates: tuple[float, float]
    limited: bool

    @property
    def parameters(self) -> int:
        return 3 if self.limited else 2


POWER = Form("power", (-1.0, 2.0), False)
SATURATING = Form("saturating", (-2.0, -0.02), True)
FORMS = (POWER, SATURATING)


@dataclass(frozen=True)
class Curves:
    """R curves y = limit + scale x^rate; all arrays are [R]. error: the sum of a curve's squared
    residuals."""

    form: Form
    limit: Floats
    scale: Floats
    rate: Floats
    error: Floats

    def at(self, x: ArrayLike) -> Floats:
        """y [R] at x (a number or [R])."""
        found: Floats = self.limit + self.scale * np.asarray(x, float) ** self.rate
        return found


def between(x: Sequence[float], y: ArrayLike, reached: ArrayLike) -> Floats:
    """The amounts [R] at which a quantity reaches `reached` (a number or [R]), by a power law
    between neighbouring points, and that of the last two points beyond them.

    x [N]: amounts above 0, ascending; y [R, N]: values from 0 at them, which count as not falling:
    one that is below an earlier one is raised to it. Infinite or 0 where a flat end is left.
    """
    amounts = np.log(np.asarray(x, float))
    risen = np.maximum.accumulate(np.atleast_2d(np.asarray(y, float)), axis=1)
    values = np.log(np.maximum(risen, TINY))
    wanted = np.log(np.maximum(np.broadcast_to(np.asarray(reached, float), len(values)), TINY))
    right = np.clip((values < wanted[:, None]).sum(1), 1, len(amounts) - 1)
    every = np.arange(len(values))
    low, high = values[every, right - 1], values[every, right]
    rise, over = high - low, wanted - low
    flat = np.where(over > 0, np.inf, -np.inf)
    share = np.divide(over, rise, out=flat, where=rise > 0)
    share = np.where((rise <= 0) & (over == 0), 0.0, share)
    width = amounts[right] - amounts[right - 1]
    with np.errstate(over="ignore"):  # infinity, which callers bound
        found: Floats = np.exp(amounts[right - 1] + share * width)
    return found


def fit(form: Form, x: Sequence[float], y: ArrayLike) -> Curves:
    """The curves of a form with the smallest squared residuals.

    x [N]: amounts above 0; y [N] or [R, N]: measured values. The result is meaningful only if there
    are at least as many points as parameters.
    """
    values = np.atleast_2d(np.asarray(y, float))
    amounts = np.asarray(x, float)
    unit = np.exp(np.log(amounts).mean())
    least, greatest = form.rates
    low, high = np.full(len(values), least), np.full(len(values), greatest)
    every = np.arange(len(values))
    for _ in range(CLOSER):
        step = (high - low) / (STEPS - 1)
        rates = low[:, None] + step[:, None] * np.arange(STEPS)  # [R, G]
        powers = (amounts / unit) ** rates[:, :, None]  # [R, G, N]
        limits, scales, errors = _project(form, powers, values[:, None])
        best = (every, errors.argmin(1))
        rate, limit, scale, error = (found[best] for found in (rates, limits, scales, errors))
        low, high = np.maximum(rate - step, least), np.minimum(rate + step, greatest)
    return Curves(form, limit, scale * unit**-rate, rate, error)


def _project(form: Form, powers: Floats, values: Floats) -> tuple[Floats, Floats, Floats]:
    """The best limits and scales [R, G] for the rates behind powers [R, G, N], and the remaining
    errors; values [R, 1, N]."""
    if form.limited:
        middle, mean = powers.mean(-1, keepdims=True), values.mean(-1, keepdims=True)
        spread = ((powers - middle) ** 2).sum(-1)
        together = ((powers - middle) * (values - mean)).sum(-1)
        scales = np.minimum(together / np.maximum(spread, TINY), 0.0)
        limits = mean[..., 0] - scales * middle[..., 0]
    else:
        scales = (powers * values).sum(-1) / (powers**2).sum(-1)
        limits = np.zeros_like(scales)
    missed = limits[..., None] + scales[..., None] * powers - values
    return limits, scales, (missed**2).sum(-1)


TINY = 1e-300


def choose(x: Sequence[float], y: Sequence[float]) -> Form:
    """The form with the smaller residual variance: the sum of squares over the number of points
    minus the number of parameters. A form with as many parameters as points is not considered. If
    both are equal, the simpler one is chosen."""
    left = {form: len(x) - form.parameters for form in FORMS}
    able = [form for form in FORMS if left[form] > 0]
    if not able:
        return POWER
    return min(able, key=lambda form: float(fit(form, x, y).error[0]) / left[form])
