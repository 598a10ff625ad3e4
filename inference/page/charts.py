"""Charts as inline SVG: dots with intervals, lines with bands, bars of reliability. Colours and fonts come from style.css.

Every chart is an image to a screen reader, with a title that says what it shows; the numbers stand in a table beside it. Series
differ in colour, in the shape of their marks and in the pattern of their lines, and carry their names at their ends.

Drawings are 360 units wide, which is their width on a phone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from inference.page.markup import Content, Html, number, tag
from inference.page.scale import Scale, fitted, shown, spread

WIDTH = 360
SMALL = 11.0
SHAPES = 6
"""Colours, marks and line patterns that are told apart (style.css: .s0 to .s5)."""


def coordinates(value: float) -> str:
    """A number as SVG takes it."""
    return f"{value:.1f}".removesuffix(".0")


def line(x1: float, y1: float, x2: float, y2: float, class_: str) -> Html:
    """A straight line."""
    places = {"x1": x1, "y1": y1, "x2": x2, "y2": y2}
    return tag("line", class_=class_, **{key: coordinates(value) for key, value in places.items()})


def label(x: float, y: float, words: Content, class_: str = "", anchor: str = "start") -> Html:
    """Text whose baseline begins (or ends, or has its middle) at a place."""
    return tag("text", words, x=coordinates(x), y=coordinates(y), class_=class_ or None, text_anchor=anchor)


def rect(x: float, y: float, width: float, height: float, class_: str, rounded: float = 0) -> Html:
    """A box."""
    sizes = {"x": x, "y": y, "width": max(0.0, width), "height": max(0.0, height)}
    corner = coordinates(rounded) if rounded else None
    return tag("rect", class_=class_, rx=corner, **{key: coordinates(value) for key, value in sizes.items()})


def drawing(height: float, title: str, *content: Content, width: float = WIDTH) -> Html:
    """An SVG of the page's width."""
    box = f"0 0 {coordinates(width)} {coordinates(height)}"
    return tag("svg", content, viewBox=box, class_="chart", role="img", aria_label=title)


def mark(x: float, y: float, shape: int, radius: float = 3.6) -> Html:
    """The mark of a series: circle, square, triangle, diamond, cross, ring."""
    r, at = radius, (coordinates(x), coordinates(y))
    if shape % SHAPES in (0, 5):
        return tag(
            "circle", cx=at[0], cy=at[1], r=coordinates(r), class_="mark hollow" if shape % SHAPES else "mark"
        )
    if shape % SHAPES == 4:
        return tag(
            "path",
            d=f"M{at[0]} {at[1]}m{-r} {-r}l{2 * r} {2 * r}m0 {-2 * r}l{-2 * r} {2 * r}",
            class_="mark cross",
        )
    paths = {
        1: f"m{-r * 0.9:.1f} {-r * 0.9:.1f}h{r * 1.8:.1f}v{r * 1.8:.1f}h{-r * 1.8:.1f}z",
        2: f"m0 {-r * 1.2:.1f}l{r * 1.15:.1f} {r * 2:.1f}h{-r * 2.3:.1f}z",
        3: f"m0 {-r * 1.3:.1f}l{r * 1.3:.1f} {r * 1.3:.1f}l{-r * 1.3:.1f} {r * 1.3:.1f}l{-r * 1.3:.1f} {-r * 1.3:.1f}z",
    }
    return tag("path", d=f"M{at[0]} {at[1]}{paths[shape % SHAPES]}", class_="mark")


# ---- dots with intervals -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Dot:
    """A row of a dot chart: a name, a value, its interval (None: not known), whether it stands out."""

    name: str
    value: float
    interval: tuple[float, float] | None = None
    strong: bool = False


def dots(title: str, rows: Sequence[Dot], reference: float, unit: str, bounds: tuple[float, float]) -> Html:
    """A dot with its interval per row. reference: a value that is marked by a line; bounds: what the axis must cover."""
    left, right, step = 126.0, 42.0, 20.0
    scale, marks = Scale.over([*bounds, reference], left, WIDTH - right, about=4)
    top, bottom = 8.0, 8.0 + step * len(rows)
    parts: list[Content] = []
    for value in marks:
        parts.append(line(scale(value), top, scale(value), bottom, "rule"))
        parts.append(label(scale(value), bottom + 15, shown(value) + unit, "tick", "middle"))
    parts.append(line(scale(reference), top - 2, scale(reference), bottom, "reference"))
    for place, row in enumerate(rows):
        y = top + step * (place + 0.5)
        low, high = row.interval or (row.value, row.value)
        words = f"{row.name}: {number(row.value)}{unit}"
        words += f", 95% interval {number(low)} to {number(high)}" if row.interval else ""
        parts.append(
            tag(
                "g",
                tag("title", words),
                label(left - 10, y + 3.8, fitted(row.name, left - 12, SMALL), "name", "end"),
                line(scale(low), y, scale(high), y, "whisker"),
                tag("circle", cx=coordinates(scale(row.value)), cy=coordinates(y), r="4", class_="dot"),
                label(WIDTH - 2, y + 3.8, number(row.value), "value", "end"),
                class_="strong" if row.strong else None,
            )
        )
    return drawing(bottom + 22, title, parts)


# ---- lines -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    """A series: points (x, y), their intervals (low, high) or none, its number among the colours (-1: background)."""

    name: str
    points: Sequence[tuple[float, float]]
    series: int = 0
    intervals: Sequence[tuple[float, float]] = ()


@dataclass(frozen=True)
class Axes:
    """How lines are drawn. x_marks: values of the x axis that are written; log: x by logarithms; top: y must reach this."""

    x_label: str
    y_label: str
    x_marks: Sequence[float] = ()
    log: bool = False
    top: float | None = None
    zero: bool = True
    percent: bool = False
    height: float = 220.0
    rings: Sequence[tuple[float, float, str]] = field(default_factory=tuple)
    """Places that are pointed out, with a word each."""
    diagonal: bool = False


def lines(title: str, series: Sequence[Line], axes: Axes) -> Html:
    """Lines with marks; names at their right ends."""
    named = [one for one in series if one.series >= 0 and one.points and one.name]
    left, right, top, bottom = 36.0, 104.0 if named else 16.0, 26.0, axes.height - 36.0
    xs = [x for one in series for x, _ in one.points] + list(axes.x_marks)
    ys = [y for one in series for _, y in one.points] + [
        v for one in series for pair in one.intervals for v in pair
    ]
    ys += [y for _, y, _ in axes.rings]
    y_scale, y_marks = Scale.over([*ys, *([axes.top] if axes.top else [])], bottom, top, axes.zero)
    x_scale = Scale(min(xs, default=0), max(xs, default=1), left + 8, WIDTH - right - 6, axes.log)
    parts: list[Content] = [label(0, 12, axes.y_label, "axis")]
    for value in y_marks:
        parts.append(line(left, y_scale(value), WIDTH - right, y_scale(value), "rule"))
        words = shown(round(100 * value, 6)) + "%" if axes.percent else shown(value)
        parts.append(label(left - 6, y_scale(value) + 3.8, words, "tick", "end"))
    for value in axes.x_marks:
        parts.append(label(x_scale(value), bottom + 15, shown(value), "tick", "middle"))
    parts.append(label((left + WIDTH - right) / 2, bottom + 31, axes.x_label, "axis", "middle"))
    if axes.diagonal:
        parts.append(line(x_scale(0), y_scale(0), x_scale(1), y_scale(1), "reference"))
    ends = spread([y_scale(one.points[-1][1]) for one in named], 13.0, top, bottom)
    parts += [
        _path(one, x_scale, y_scale)
        for one in sorted(series, key=lambda one: -one.series if one.series >= 0 else -99)
    ]
    for one, y in zip(named, ends, strict=True):
        x = x_scale(one.points[-1][0])
        parts.append(
            tag(
                "g",
                line(x + 5, y_scale(one.points[-1][1]), WIDTH - right + 6, y, "leader"),
                label(WIDTH - right + 9, y + 3.8, fitted(one.name, right - 8, SMALL), "name"),
                class_=f"s{one.series % SHAPES}",
            )
        )
    for x, y, words in axes.rings:
        at = x_scale(x), y_scale(y)
        parts.append(tag("circle", cx=coordinates(at[0]), cy=coordinates(at[1]), r="7.5", class_="ring"))
        parts.append(label(at[0], at[1] - 12, words, "ringed", "middle" if at[0] > left + 50 else "start"))
    return drawing(axes.height, title, parts)


def _path(one: Line, x_scale: Scale, y_scale: Scale) -> Html:
    """A series: its band of intervals, its line, its marks."""
    if not one.points:
        return Html("")
    places = [(x_scale(x), y_scale(y)) for x, y in one.points]
    route = "M" + "L".join(f"{coordinates(x)} {coordinates(y)}" for x, y in places)
    parts: list[Content] = []
    for (x, _), (low, high) in zip(places, one.intervals, strict=False):
        parts.append(line(x, y_scale(low), x, y_scale(high), "whisker"))
    parts.append(tag("path", d=route, class_="line"))
    if one.series >= 0:
        parts += [mark(x, y, one.series) for x, y in places]
    return tag(
        "g", tag("title", one.name), parts, class_=f"s{one.series % SHAPES}" if one.series >= 0 else "context"
    )
