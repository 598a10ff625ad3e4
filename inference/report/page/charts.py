"""Charts as inline SVG: the geometry. templates/charts.html.j2 draws them, style.css colours them.

A drawing is 360 units wide, which is its width on a phone. For a screen reader, every chart is an
image with a title that describes it; its numbers are in a table next to it. Series differ in
colour, in the shape of their marks and in the pattern of their lines.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, NamedTuple

from inference.report.model import CalibrationBin, Interval, LossSplit
from inference.report.page.formats import interval, number

WIDTH = 360
SERIES = 6
"""Number of series that can be distinguished (style.css: .s0 to .s5)."""
STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)
ROW = 20.0
"""Height of a row of a chart with named rows."""
TOP = 8.0
"""Vertical start of the first of these rows."""


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers from at most `low` to at least `high`, approximately this many."""
    if not math.isfinite(low + high) or high <= low:
        return [low, low + 1.0]
    rough = (high - low) / max(1, about - 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in STEPS if factor * power >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 10) for i in range(first, last + 1)]


@dataclass(frozen=True)
class Scale:
    """Maps [low, high] to [start, end] in units of the drawing; log: by logarithms to base 2."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    @classmethod
    def over(
        cls, values: Sequence[float], start: float, end: float, zero: bool = False, about: int = 5
    ) -> tuple[Scale, list[float]]:
        """A linear scale over the values, widened to round ticks, and the ticks. zero: begin at
        0."""
        low, high = (min(values), max(values)) if values else (0.0, 1.0)
        low = min(low, 0.0) if zero else low
        marks = ticks(low, high if high > low else low + 1.0, about)
        return cls(marks[0], marks[-1], start, end), marks

    def __call__(self, value: float) -> float:
        low, high, at = self.low, self.high, value
        if self.log:
            low, high, at = (math.log2(max(item, 1e-12)) for item in (low, high, at))
        share = (at - low) / (high - low) if high != low else 0.5
        return self.start + min(1.0, max(0.0, share)) * (self.end - self.start)


def spread(places: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """The places, moved to distances of at least `gap`, within [low, high] if there is room."""
    order = sorted(range(len(places)), key=lambda i: places[i])
    moved = list(places)
    for before, here in pairwise(order):
        moved[here] = max(moved[here], moved[before] + gap)
    if order and moved[order[-1]] > high:
        moved[order[-1]] = high
        for here, after in zip(reversed(order[:-1]), reversed(order), strict=False):
            moved[here] = min(moved[here], moved[after] - gap)
    return [max(low, place) for place in moved]


# Dots with intervals


@dataclass(frozen=True)
class Dot:
    """A row of a dot chart. interval: None where it is not known; strong: drawn to stand out."""

    name: str
    value: float
    interval: Interval | None = None
    strong: bool = False

    @property
    def bounds(self) -> tuple[float, ...]:
        """The value and the ends of its interval."""
        return self.value, *(self.interval or ())

    def words(self, unit: str) -> str:
        """The row as a sentence."""
        known = f", 95% interval {interval(self.interval)}" if self.interval else ""
        return f"{self.name}: {number(self.value)}{unit}{known}"


class Dots:
    """One dot with its interval per row, and a line at `reference`. bounds: the range of the
    axis."""

    kind: ClassVar[str] = "dots"

    def __init__(
        self, title: str, rows: Sequence[Dot], reference: float, unit: str, bounds: Interval
    ) -> None:
        self.title, self.rows, self.reference, self.unit = title, rows, reference, unit
        self.bottom = TOP + ROW * len(rows)
        self.x, self.marks = Scale.over([*bounds, reference], 126.0, WIDTH - 42.0, about=4)


# Lines


@dataclass(frozen=True)
class Line:
    """A series of points (x, y). series: its number among the colours; -1: background."""

    name: str
    points: Sequence[tuple[float, float]]
    series: int = 0
    intervals: Sequence[Interval] = ()

    @property
    def style(self) -> int:
        """Number of its colour, mark and pattern."""
        return self.series % SERIES


class Lines:
    """Lines with marks, and with their names at their right ends.

    marks: labelled values of the x axis. log: logarithmic x axis. top: the y axis reaches at least
    this value. percent: y in percent. rings: (x, y, word) of points that are marked.
    """

    kind: ClassVar[str] = "lines"

    def __init__(
        self,
        title: str,
        series: Sequence[Line],
        x_label: str,
        y_label: str,
        marks: Sequence[float] = (),
        *,
        log: bool = False,
        top: float | None = None,
        percent: bool = False,
        height: float = 250.0,
        rings: Sequence[tuple[float, float, str]] = (),
    ) -> None:
        self.title, self.x_label, self.y_label = title, x_label, y_label
        self.marks, self.percent, self.height, self.rings = marks, percent, height, rings
        named = [one for one in series if one.series >= 0 and one.points and one.name]
        self.bottom, self.left, self.right = height - 36.0, 36.0, WIDTH - (104.0 if named else 16.0)
        xs = [x for one in series for x, _ in one.points] + list(marks)
        ys = [y for one in series for _, y in one.points] + [y for _, y, _ in rings]
        ys += [bound for one in series for pair in one.intervals for bound in pair]
        ys += [top] if top else []
        self.y, self.y_marks = Scale.over(ys, self.bottom, 26.0, zero=True)
        low, high = min(xs, default=0), max(xs, default=1)
        self.x = Scale(low, high, self.left + 8, self.right - 6, log)
        drawn = [one for one in series if one.points]
        self.series = sorted(drawn, key=lambda one: -one.series if one.series >= 0 else -99)
        lasts = [self.y(one.points[-1][1]) for one in named]
        self.names = list(zip(named, spread(lasts, 13.0, 26.0, self.bottom), strict=True))

    def path(self, line: Line) -> list[tuple[float, float]]:
        """A line's points in units of the drawing."""
        return [(self.x(x), self.y(y)) for x, y in line.points]


# Drawings of a split and of a calibration

TERMS = {
    "ends": "answers end",
    "vocabulary": "draft vocabulary",
    "drafter": "drafter error",
    "coupling": "coupling",
    "candidates": "more candidates",
    "shape": "tree shape",
    "sample": "rest of tau",
    "widening": "wider verification",
    "drafting": "drafting",
    "commit": "commit",
    "host": "host",
    "clock": "rest of time",
}
"""Display names of the terms of the split (`inference.measure.breakdown.split`)."""
RESTS = ("sample", "clock")
NOTHING = 0.005
"""A factor this close to 1 is not drawn."""


class Fall(NamedTuple):
    """One term of a waterfall: a bar from the level before to the level after it."""

    name: str
    factor: float
    ci95: Interval
    before: float
    after: float
    kind: str
    """"loss", "gain" or "rest"."""
    quiet: bool


class Waterfall:
    """The terms of one split as falling bars. top: the end of the axis, which several charts
    share."""

    kind: ClassVar[str] = "waterfall"

    def __init__(self, name: str, split: LossSplit, top: float) -> None:
        self.ceiling, self.speedup = split.ceiling, split.speedup
        ends = f"{number(split.ceiling)} to a measured speedup of {number(split.speedup)}"
        self.title = f"{name}: from a ceiling of {ends}"
        self.x, self.marks = Scale.over([top], 118.0, WIDTH - 46.0, zero=True)
        self.bottom = TOP + ROW * (len(split.terms) + 2)
        self.falls, level = [], split.ceiling
        for term in split.terms:
            after = level * term.factor
            kind = "rest" if term.name in RESTS else "gain" if after > level else "loss"
            name = TERMS.get(term.name, term.name)
            quiet = abs(term.factor - 1.0) < NOTHING
            self.falls.append(Fall(name, term.factor, term.ci95, level, after, kind, quiet))
            level = after


class Reliability:
    """Accepted share over confidence: one dot per bin, whose area is proportional to its drafts."""

    kind: ClassVar[str] = "reliability"
    marks = (0.0, 0.25, 0.5, 0.75, 1.0)
    x = Scale(0.0, 1.0, 36.0, 272.0)
    y = Scale(0.0, 1.0, 262.0, 26.0)

    def __init__(self, name: str, bins: Sequence[CalibrationBin]) -> None:
        self.title = f"{name}: accepted share of drafts by confidence"
        self.bins = [cell for cell in bins if cell.count]
        self.most = max((cell.count for cell in bins), default=1)

    def radius(self, cell: CalibrationBin) -> float:
        """Of a bin's dot."""
        return 2.0 + 9.0 * (cell.count / self.most) ** 0.5


class Segment(NamedTuple):
    """A part of a bar: from `start` to `end` in the unit of the chart. style: its colour."""

    name: str
    start: float
    end: float
    style: int


class Stack:
    """A bar of segments per row, and a line at `reference`; the legend lists the segments'
    names."""

    kind: ClassVar[str] = "stack"

    def __init__(
        self, title: str, rows: Sequence[tuple[str, list[Segment]]], reference: float, unit: str
    ) -> None:
        self.title, self.rows, self.reference, self.unit = title, rows, reference, unit
        self.bottom = TOP + ROW * len(rows)
        ends = [segments[-1].end for _, segments in rows]
        self.x, self.marks = Scale.over([*ends, reference], 126.0, WIDTH - 46.0, zero=True, about=4)
        found = {one.name: one.style for _, segments in rows for one in segments}
        self.legend = list(found.items())


Chart = Dots | Lines | Waterfall | Reliability | Stack


@dataclass(frozen=True)
class Figure:
    """A chart under its heading, with a note below."""

    title: str
    chart: Chart
    note: str = ""
