"""Evidence about a ratio accepted / passes, kept for all its possible values at once. `headstart
watch` is built on it.

A domain's acceptance is r = E[a] / E[n], with n the verify passes of one answer, cut at the first P
of them, and a the drafted tokens that they accepted. For a supposed value s, `below` grows if the
truth lies below s, and `above` grows if it lies above. Both are e-values: with the truth at or
beyond s their mean is at most 1, and the chance that they ever reach 1 / alpha is at most alpha,
for any number of looks (Ville's inequality).

`Bets` only assumes that the answers are draws from one distribution (or at least none whose
conditional mean is worse). A gambler stakes a fixed share c of her money on every answer
(Waudby-Smith & Ramdas, 2010.09686, with the mean of several gamblers). Since n <= P and 0 <= a <= D
n for drafts D deep,

    below(s) = mean over c of prod over answers of  1 - c (a - s n) / (P (D - s))
    above(s) = mean over c of prod over answers of  1 + c (a / s - n) / P

are never negative. `below` rises with s and `above` falls with it, whatever the answers, so
evidence at a grid's points bounds the evidence between them. The order of the answers does not
matter.

A window of a server's counters counts as one observation: its acceptance, for P passes.

`Sums` knows only totals, from a card or from a server's counters. It treats the sum of a - s n as
normal with a spread that was measured elsewhere (the mixture SPRT with a half-normal prior). This
is an approximation, and reports say so.

The cut at P passes allows larger stakes, because the worst possible answer limits what a gambler
may stake. An answer of M tokens has at least (M - 1) / (D + 1) passes unless its text ends before,
so nothing is missing up to that number.

Legend: G points of the grid, C shares.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import ceil, floor, log

import numpy as np
import torch
from numpy.typing import NDArray

Floats = NDArray[np.float64]
STEP = 0.01
"""Relative distance from one point of the grid to the next."""
SMALLEST = 0.01
"""The lowest point as a share of the deepest draft: 0.04 tokens per pass for a draft of 4."""
SHARES = np.array([0.05, 0.1, 0.2, 0.4, 0.7, 0.95])
EDGE = 0.02
"""`below` bets on s as if it were at least this share short of the deepest draft: otherwise its
stake would grow without bound."""


@dataclass(frozen=True)
class Grid:
    """Supposed acceptances for drafts `depth` deep: equal steps of the logarithm up to `depth`,
    `values` [G]."""

    depth: int
    values: Floats = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        steps = np.arange(ceil(-log(SMALLEST) / log(1.0 + STEP)), -1, -1)
        object.__setattr__(self, "values", self.depth * (1.0 + STEP) ** -steps.astype(np.float64))

    @property
    def lower(self) -> Floats:
        """The points at which `below` is known: 0, then all points [G + 1]."""
        return np.concatenate([[0.0], self.values])

    @property
    def upper(self) -> Floats:
        """The points at which `above` is known: all points, then infinity [G + 1]."""
        return np.concatenate([self.values, [np.inf]])


def ratio(shift: int) -> float:
    return float((1.0 + STEP) ** shift)


def shift_below(share: float) -> int:
    """The number of points that brings a value to `share` of it or just below."""
    return floor(log(share) / log(1.0 + STEP) + 1e-9)


class Bets:
    """Evidence from single answers; see the module. most: P, where answers are cut; answers:
    (accepted, passes) of each."""

    exact = True
    """No normal distribution is assumed."""

    def __init__(self, grid: Grid, most: int, answers: Iterable[tuple[int, int]] = ()) -> None:
        self.grid, self.most = grid, most
        self.accepted = self.passes = 0.0
        self.answers = 0
        self._below = np.zeros((len(SHARES), len(grid.values) + 1))
        self._above = np.zeros_like(self._below)
        for accepted, passes in answers:
            self.add(accepted, passes)

    def add(self, accepted: float, passes: float) -> None:
        self._below += below_factors(self.grid, self.most, accepted, passes)
        self._above += above_factors(self.grid, self.most, accepted, passes)
        self.accepted += accepted
        self.passes += passes
        self.answers += 1

    def below(self) -> Floats:
        """Logarithm [G + 1] of the evidence that the truth lies below each point of
        `Grid.lower`."""
        return log_mean(self._below)

    def above(self) -> Floats:
        """Logarithm [G + 1] of the evidence that the truth lies above each point of
        `Grid.upper`."""
        return log_mean(self._above)


def below_factors(grid: Grid, most: int, accepted: float, passes: float) -> Floats:
    """Logarithms [C, G + 1] of the factors by which one answer multiplies the money of the gamblers
    who bet on a low acceptance."""
    within = 0 <= accepted <= grid.depth * passes * (1.0 + 1e-9) and passes <= most
    assert within, (accepted, passes, most)
    room = grid.depth - np.minimum(grid.lower, (1.0 - EDGE) * grid.depth)
    lost = (accepted - grid.lower * passes) / (most * room)
    return np.asarray(np.log1p(-SHARES[:, None] * lost))


def above_factors(grid: Grid, most: int, accepted: float, passes: float) -> Floats:
    won = (accepted / grid.upper - passes) / most
    return np.asarray(np.log1p(SHARES[:, None] * won))


class Sums:
    """Evidence from totals; see the module. spread: variance of a sum of (a - s n) per verify pass
    in it; prior: the passes for which the mixture is sharpest."""

    exact = False

    def __init__(
        self, grid: Grid, accepted: float, passes: float, spread: float, prior: float
    ) -> None:
        self.grid, self.accepted, self.passes = grid, accepted, passes
        self.spread, self.prior, self.answers = spread, prior, 0

    def below(self) -> Floats:
        """See `Bets.below`."""
        return self._mixture(self.grid.lower * self.passes - self.accepted)

    def above(self) -> Floats:
        """See `Bets.above`; at infinity nothing is held."""
        return np.append(self._mixture(self.accepted - self.grid.values * self.passes), -np.inf)

    def _mixture(self, excess: Floats) -> Floats:
        """log of 2 sqrt(p / (v + p)) exp(z^2 / 2) Phi(z), z = excess / sqrt(v + p), with variances
        v of the sum, p of the prior."""
        variance, prior = self.spread * self.passes, self.spread * self.prior
        z = excess / np.sqrt(variance + prior)
        phi = torch.special.log_ndtr(torch.from_numpy(z)).numpy()
        return np.asarray(log(2.0) + 0.5 * np.log(prior / (variance + prior)) + 0.5 * z * z + phi)


RatioEvidence = Bets | Sums
"""Evidence about one acceptance."""


def log_mean(values: Floats) -> Floats:
    top = values.max(0)
    return np.asarray(top + np.log(np.exp(values - top).mean(0)))


def interval(evidence: RatioEvidence, grid: Grid, miss: float) -> tuple[float, float]:
    """The acceptances that the evidence does not contradict; the chance that this excludes the
    truth is `miss`."""
    least = log(2.0 / miss)
    low = grid.upper[:-1][evidence.above()[:-1] >= least]
    high = grid.lower[evidence.below() >= least]
    return float(low.max(initial=0.0)), float(high.min(initial=grid.depth))
