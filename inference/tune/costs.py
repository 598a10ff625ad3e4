"""The cost of a step: cost curves of the compared drafts, corrected by how decoding differs from
them.

A point of a curve is a single call (`inference.decoding.costs`). Decoding combines the calls, and
adds picks, acceptance, and the host's work between steps. So every family of drafts is run briefly
at every batch size. The ratio of each phase's seconds to the curve's corrects the curve, and the
time outside the three phases is a step's fixed time.

Legend: b rows, n nodes, L cached tokens of the longest row, B rows decoded together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

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
    """Seconds of a decoding step: corrected curves. calibrations: corrections by (family, b);
    without one, the curves are used unchanged."""

    curves: CostCurves
    calibrations: dict[tuple[str, int], Calibration] = field(default_factory=dict)

    def phases(self, draft: Draft, b: float, length: float, nodes: float = 0) -> dict[str, float]:
        """Seconds by phase of a step in b rows, the longest of which has `length` tokens. nodes:
        the verified nodes, if drafts stop early; 0: all."""
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

    def by_drafted(self, chain: Draft, stepwise: bool, b: float, length: float) -> list[float]:
        """Seconds of a step by the number of tokens, from 0 to all, after which the chain ends
        because the next token is improbable. stepwise: the drafter computes token by token, up to
        that improbable one; otherwise one pass computes all."""
        labels = {d: Draft("chain", d).label for d in range(1, chain.depth + 1)}
        measured = [d for d, label in labels.items() if label in self.curves.draft_points]
        drafting = [self.curves.draft(labels[d], d + 1, b, length) for d in measured]
        found = []
        for drafted in range(chain.depth + 1):
            phases = self.phases(chain, b, length, drafted + 1)
            if stepwise:
                computed = min(drafted + 1, chain.depth)
                part = float(np.interp(computed, [0, *measured], [0.0, *drafting]))
                phases["draft"] *= divide(part, drafting[-1])
            found.append(sum(phases.values()))
        return found

    def correction(self, family: str, b: float) -> tuple[Mapping[str, float], float]:
        """Ratios and fixed seconds at b rows: interpolated between the batch sizes that were run,
        and those of the nearest one outside them."""
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
        """Set the calibration of a family at `rows` rows from the clocks of its runs. It uses sums
        over the runs, as the ratio of a very cheap draft says little about an expensive one.
        """
        expected, booked = dict.fromkeys(MEASURED, 0.0), dict.fromkeys(MEASURED, 0.0)
        other = 0.0
        for run in runs:
            step = self.on_curves(run.draft, rows, run.length, run.nodes)
            for phase, seconds in run.clock.seconds.items():
                if phase in MEASURED and step[phase]:
                    expected[phase] += run.clock.passes * step[phase]
                    booked[phase] += seconds
                elif phase != "prefill":  # includes a loop's drafting phase without a drafter
                    other += seconds
        ratios = {
            phase: divide(booked[phase], seconds) if seconds else 1.0
            for phase, seconds in expected.items()
        }
        steps = sum(run.clock.passes for run in runs)
        self.calibrations[family, rows] = Calibration(ratios, divide(other, steps))


@dataclass(frozen=True)
class TimedRun:
    """A short decoding run: mean length of the longest row, nodes verified (0: the draft's size),
    and its clock."""

    draft: Draft
    length: float
    nodes: float
    clock: StepClock
