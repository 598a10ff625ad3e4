"""What a step costs: cost curves of the drafts that are weighed, and how far decoding differs from
them.

A curve's point is one call on its own (`inference.decoding.costs`). Decoding puts the calls
together, and does more than that: picks, acceptance, what the host does between steps. So every
family of drafts is run for a short while at every batch size: the ratio of each phase's seconds to
the curves' corrects the curves, and what is none of the three phases is a step's fixed time.

Legend: b rows, n nodes, L cached tokens of the longest row, B rows decoded together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from inference.decoding.clock import StepClock
from inference.decoding.costs import CostCurves
from inference.decoding.draft import Draft
from inference.measure.metrics import divide

MEASURED = ("draft", "verify", "commit")
"""The phases of a step that have a curve."""


@dataclass(frozen=True)
class Calibration:
    """How decoding differed from the curves, for one family of drafts at one batch size.

    ratios: phase -> seconds in decoding / seconds on the curve; other: seconds per step besides
    those phases.
    """

    ratios: Mapping[str, float]
    other: float


@dataclass
class StepCosts:
    """Seconds of a step of decoding: curves, corrected. calibrations: (family, b) -> how; without
    one curves hold as they are."""

    curves: CostCurves
    calibrations: dict[tuple[str, int], Calibration] = field(default_factory=dict)

    def phases(self, draft: Draft, b: float, length: float, nodes: float = 0) -> dict[str, float]:
        """Seconds by phase of a step in b rows, the longest of which holds `length` tokens. nodes:
        those verified, where drafts stop early; 0: all."""
        found = self.on_curves(draft, b, length, nodes)
        ratios, other = self.correction(draft.family, b)
        return {name: found[name] * ratios.get(name, 1.0) for name in MEASURED} | {"other": other}

    def step(self, draft: Draft, b: float, length: float, nodes: float = 0) -> float:
        """Seconds of a step: see `phases`."""
        return sum(self.phases(draft, b, length, nodes).values())

    def on_curves(
        self, draft: Draft, b: float, length: float, nodes: float = 0
    ) -> dict[str, float]:
        """The phases that have a curve, uncorrected."""
        verify = self.curves.verify(nodes or draft.size, b, length)
        if draft.shape == "none":
            return {"draft": 0.0, "verify": verify, "commit": 0.0}
        step = (draft.unstopped.label, draft.size, b, length)
        return {
            "draft": self.curves.draft(*step),
            "verify": verify,
            "commit": self.curves.commit(*step),
        }

    def correction(self, family: str, b: float) -> tuple[Mapping[str, float], float]:
        """Ratios and fixed seconds at b rows, between the batch sizes that were run; the nearest
        one's outside them."""
        known = sorted(rows for name, rows in self.calibrations if name == family)
        if not known:
            return {}, 0.0
        below = max((rows for rows in known if rows <= b), default=known[0])
        above = min((rows for rows in known if rows >= b), default=known[-1])
        low, high = self.calibrations[family, below], self.calibrations[family, above]
        share = min(max(divide(b - below, above - below), 0.0), 1.0)
        ratios = {
            phase: ratio + share * (high.ratios[phase] - ratio)
            for phase, ratio in low.ratios.items()
        }
        return ratios, low.other + share * (high.other - low.other)

    def calibrate(self, family: str, rows: int, runs: Sequence[TimedRun]) -> None:
        """Take over what the clock booked while drafts of a family were decoded in `rows` rows.
        Sums over the runs: the ratio of a draft that costs next to nothing says little about one
        that costs much.
        """
        expected, booked = dict.fromkeys(MEASURED, 0.0), dict.fromkeys(MEASURED, 0.0)
        other = 0.0
        for run in runs:
            step = self.on_curves(run.draft, rows, run.length, run.nodes)
            for phase, seconds in run.clock.seconds.items():
                if phase in MEASURED and step[phase]:
                    expected[phase] += run.clock.passes * step[phase]
                    booked[phase] += seconds
                elif phase != "prefill":  # also what a loop without drafter books to drafting
                    other += seconds
        ratios = {
            phase: divide(booked[phase], seconds) if seconds else 1.0
            for phase, seconds in expected.items()
        }
        steps = sum(run.clock.passes for run in runs)
        self.calibrations[family, rows] = Calibration(ratios, divide(other, steps))


@dataclass(frozen=True)
class TimedRun:
    """A short decoding: mean length of the longest row, nodes verified (0: the draft's size), what
    the clock booked."""

    draft: Draft
    length: float
    nodes: float
    clock: StepClock
