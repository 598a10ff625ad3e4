"""How often the watch alarms on resampled streams of real answers: its test, on many streams at a
time.

A stream draws its reference and its fresh answers with replacement from pools of (accepted, passes)
by domain, so that where both pools are the same the drafter is unchanged by construction.
`DriftTest` sees one answer at a time; here each answer's factors are computed once and added along
the stream, which gives the same numbers (tests/scripts/evidence/test_staleness.py).

Legend: T answers of a stream, C shares, G points of the grid, P answers of a pool.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log

import numpy as np

from inference.staleness.evidence import (
    Floats,
    Grid,
    above_factors,
    below_factors,
    log_mean,
    shift_below,
)

Pools = Mapping[str, Sequence[tuple[int, int]]]


@dataclass(frozen=True)
class Plan:
    """Of all streams. reference: answers of the reference by domain; length: fresh answers of a
    stream, all domains together."""

    reference: Mapping[str, int]
    length: int
    tolerance: float
    alarm_rate: float


class Streams:
    """Draws streams and says after how many answers each raised an alarm. known, fresh: pools by
    domain."""

    def __init__(self, grid: Grid, most: int, known: Pools, fresh: Pools, plan: Plan) -> None:
        self.plan, self.domains = plan, sorted(plan.reference)
        self.needed = log((len(self.domains) + 1) / plan.alarm_rate)
        self.above = {
            name: np.stack([above_factors(grid, most, *pair)[:, :-1] for pair in known[name]])
            for name in self.domains
        }
        self.below = {
            name: np.stack([below_factors(grid, most, *pair) for pair in fresh[name]])
            for name in self.domains
        }
        cells = np.arange(len(grid.values))
        shift = shift_below(1.0 - plan.tolerance)
        self.at = np.where(cells == 0, 0, np.clip(cells + shift, 0, len(grid.values)))
        sizes = np.array([len(fresh[name]) for name in self.domains], dtype=np.float64)
        self.mix = sizes / sizes.sum()

    def run(self, count: int, seed: int = 0) -> list[int | None]:
        """Fresh answers until the alarm for each of `count` streams, None where there was none."""
        rng = np.random.default_rng(seed)
        return [self.one(rng) for _ in range(count)]

    def one(self, rng: np.random.Generator) -> int | None:
        """One stream."""
        which = rng.choice(len(self.domains), self.plan.length, p=self.mix)
        together = np.zeros(self.plan.length)
        first = self.plan.length
        for number, name in enumerate(self.domains):
            known = rng.integers(0, len(self.above[name]), self.plan.reference[name])
            places = np.flatnonzero(which == number)
            if not len(places):
                continue
            evidence = self.evidence(
                name, known, rng.integers(0, len(self.below[name]), len(places))
            )
            held = np.zeros(self.plan.length)
            held[places] = np.diff(
                evidence, prepend=0.0
            )  # the domain's evidence stays until its next answer
            together += held.cumsum()
            hits = places[evidence >= self.needed]
            first = min(first, *hits[:1]) if len(hits) else first
        hits = np.flatnonzero(together >= self.needed)
        first = min(first, hits[0]) if len(hits) else first
        return None if first == self.plan.length else int(first) + 1

    def evidence(self, name: str, known: np.ndarray, fresh: np.ndarray) -> Floats:
        """Logarithm of the evidence [T'] that a domain's acceptance has fallen, after each of its
        fresh answers."""
        above = log_mean(self.above[name][known].sum(0))  # [G]
        below = self.below[name][fresh].cumsum(0)  # [T', C, G + 1]
        return np.asarray((above + log_mean(below.swapaxes(0, 1))[:, self.at]).min(1))
