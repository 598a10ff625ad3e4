"""The sequential test: has acceptance, by domain and overall, fallen by more than the tolerance?

Reference and fresh answers are both samples, so a fall is shown only if every acceptance r that the
reference may have had is ruled out. For each r, the reference's evidence that its acceptance was
higher is multiplied with the fresh answers' evidence that theirs lies below (1 - tolerance) r. The
smallest product over r counts. It is at most the e-value of the true r. So over the whole stream,
for any number of looks, the chance that an unchanged drafter's product ever reaches 1 / alpha is at
most alpha. K domains and all of them together (the product over domains) share the alarm rate:
alpha = alarm_rate / (K + 1) each.

Intervals of the change are the ratios fresh / reference that are not ruled out this way, 95% each
for any number of looks.

Legend: G points of the grid.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf, log

import numpy as np

from inference.staleness.evidence import Bets, Grid, RatioEvidence, interval, ratio, shift_below

MISS = 0.05
"""Intervals leave the truth out with at most this chance."""
OVERALL = "all"
ALARM, FINE, OPEN = "alarm", "fine", "open"


@dataclass
class Change:
    """The result for one domain, or for all: acceptance, which is accepted drafted tokens per
    verify pass.

    change: fresh / reference - 1; its interval is None if domains moved so differently that no
    single ratio fits. evidence: natural logarithm of the largest e-value so far; verdict: alarm,
    fine (a fall beyond the tolerance is ruled out) or open. by_depth: share of the passes that
    accepted each depth, if single answers are known.
    """

    answers: int
    reference: float
    reference_ci95: tuple[float, float] | None
    fresh: float
    fresh_ci95: tuple[float, float] | None
    change: float
    change_ci95: tuple[float, float] | None
    evidence: float
    needed: float
    verdict: str
    by_depth: list[float] | None = None
    reference_by_depth: list[float] | None = None


@dataclass
class DriftTest:
    """Tests fresh answers against the reference's evidence by domain. most: passes of an answer
    that count."""

    grid: Grid
    most: int
    reference: Mapping[str, RatioEvidence]
    tolerance: float
    alarm_rate: float
    fresh: dict[str, RatioEvidence] = field(default_factory=dict)
    unknown: dict[str, RatioEvidence] = field(default_factory=dict)
    answers: int = 0
    alarm_after: int | None = None
    """Fresh answers seen until the first alarm."""
    _peaks: dict[str, float] = field(default_factory=dict)
    _now: dict[str, float] = field(default_factory=dict)

    @property
    def needed(self) -> float:
        """Logarithm of the e-value that raises an alarm."""
        return log((len(self.reference) + 1) / self.alarm_rate)

    @property
    def alarms(self) -> list[str]:
        """Domains (and `OVERALL`) whose evidence was sufficient at any look."""
        return [name for name, peak in self._peaks.items() if peak >= self.needed]

    def add(self, domain: str, accepted: float, passes: float) -> None:
        """Count one fresh answer, or a window scaled to one answer, and test. An answer of an
        unknown domain is only counted."""
        self.answers += 1
        place = self.fresh if domain in self.reference else self.unknown
        bets = place.get(domain) or Bets(self.grid, self.most)
        assert isinstance(bets, Bets), "answers and totals cannot be mixed"
        bets.add(accepted, passes)
        self.replace(domain, bets)

    def replace(self, domain: str, evidence: RatioEvidence) -> None:
        """Replace the evidence of a domain by newer evidence, and test."""
        if domain not in self.reference:
            self.unknown[domain] = evidence
            return
        self.fresh[domain] = evidence
        shift = shift_below(1.0 - self.tolerance)
        self._now[domain] = fallen(self.reference[domain], self.fresh[domain], shift)
        together = sum(self._now.values())
        for name, value in ((domain, self._now[domain]), (OVERALL, together)):
            self._peaks[name] = max(self._peaks.get(name, -inf), value)
        if self.alarm_after is None and self.alarms:
            self.alarm_after = self.answers

    # What came out

    def changes(self) -> dict[str, Change]:
        """Domain -> its result, `OVERALL` last; empty before the first answer."""
        names = [name for name in self.reference if name in self.fresh]
        groups = {name: [name] for name in names} | ({OVERALL: names} if names else {})
        return {name: self._change(name, domains) for name, domains in groups.items()}

    def _change(self, name: str, domains: list[str]) -> Change:
        known = [self.reference[domain] for domain in domains]
        fresh = [self.fresh[domain] for domain in domains]
        passes = np.array([part.passes for part in fresh])
        before = mean_acceptance([part.accepted / part.passes for part in known], passes)
        after = mean_acceptance([part.accepted / max(1.0, part.passes) for part in fresh], passes)
        bounds = ratio_interval(list(zip(known, fresh, strict=True)), MISS)
        one = name != OVERALL
        calm = FINE if bounds is not None and bounds[0] >= -self.tolerance else OPEN
        return Change(
            answers=sum(part.answers for part in fresh),
            reference=before,
            reference_ci95=interval(known[0], self.grid, MISS) if one else None,
            fresh=after,
            fresh_ci95=interval(fresh[0], self.grid, MISS) if one else None,
            change=after / before - 1.0 if before else 0.0,
            change_ci95=bounds,
            evidence=self._peaks[name],
            needed=self.needed,
            verdict=ALARM if name in self.alarms else calm,
        )


def mean_acceptance(values: list[float], passes: np.ndarray) -> float:
    weights = passes if passes.sum() else np.ones(len(values))
    return float(np.average(values, weights=weights))


def fallen(reference: RatioEvidence, fresh: RatioEvidence, shift: int) -> float:
    """Logarithm of the evidence that the fresh acceptance lies below `ratio(shift)` of the
    reference's. The reference's acceptance lies in one of the grid's cells, from one point to the
    next; the evidence is taken at the end of the cell with the weaker claim."""
    above, below = reference.above()[:-1], fresh.below()
    cells = np.arange(len(above))
    at = np.where(cells == 0, 0, np.clip(cells + shift, 0, len(below) - 1))
    return float((above + below[at]).min())


def risen(reference: RatioEvidence, fresh: RatioEvidence, shift: int) -> float:
    """The same for a fresh acceptance above `ratio(shift)` of the reference's."""
    below, above = reference.below()[:-1], fresh.above()
    cells = np.arange(len(below))
    return float((below + above[np.clip(cells + shift, 0, len(above) - 1)]).min())


def ratio_interval(
    pairs: list[tuple[RatioEvidence, RatioEvidence]], miss: float
) -> tuple[float, float] | None:
    """Interval of fresh / reference - 1 that all pairs of (reference, fresh) share; None if there
    is no such ratio."""
    least, span = log(2.0 / miss), len(pairs[0][0].below())

    def first(holds: Callable[[int], bool]) -> int:
        """The smallest shift in (-span, span] for which a condition holds that stays true once it
        is; span + 1 if there is none."""
        low, high = -span, span + 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if holds(middle) else (middle, high)
        return high

    high = first(lambda shift: sum(fallen(*pair, shift) for pair in pairs) >= least)
    low = first(lambda shift: sum(risen(*pair, shift) for pair in pairs) < least) - 1
    least_change = -1.0 if low == -span else ratio(low) - 1.0
    most_change = inf if high == span + 1 else ratio(high) - 1.0
    return (least_change, most_change) if least_change <= most_change else None
