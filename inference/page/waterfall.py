"""Two drawings of their own: the way from the ceiling to the measured speedup, and how well confidences hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from inference.page.charts import SMALL, WIDTH, coordinates, drawing, label, line, rect
from inference.page.markup import Content, Html, number, tag
from inference.page.scale import Scale, fitted, shown

WORDS = {
    "ends": "answers end",
    "vocabulary": "draft vocabulary",
    "drafter": "drafter error",
    "coupling": "coupling",
    "candidates": "more candidates",
    "shape": "tree shape",
    "sample": "rest of tau",
    "widening": "wider verification",
    "drafting": "drafting",
    "commit": "takeover",
    "host": "host",
    "clock": "rest of time",
}
"""Terms of the split (`inference.measure.breakdown.split`) as the page calls them."""
RESTS = ("sample", "clock")
NOTHING = 0.005
"""A factor so close to 1 is drawn as nothing."""


def waterfall(name: str, part: Mapping[str, Any], top: float) -> Html:
    """The terms of one split as falling bars. top: where the axis ends, shared by several drawings."""
    left, right, step = 118.0, 46.0, 20.0
    scale, marks = Scale.over([top], left, WIDTH - right, zero=True, about=5)
    rows, first = len(part["terms"]) + 2, 8.0
    bottom = first + step * rows
    parts: list[Content] = []
    for value in marks:
        parts.append(line(scale(value), first, scale(value), bottom, "rule"))
        parts.append(label(scale(value), bottom + 15, shown(value) + "\u00d7", "tick", "middle"))
    parts.append(line(scale(1.0), first - 2, scale(1.0), bottom, "reference"))
    level = float(part["ceiling"])
    parts.append(_whole("ceiling", level, scale, left, first + step * 0.5, "ceiling"))
    for place, term in enumerate(part["terms"], start=1):
        after = level * term["factor"]
        parts.append(_fall(term, level, after, scale, left, first + step * (place + 0.5)))
        if place < len(part["terms"]):
            x = scale(after)
            parts.append(
                line(x, first + step * (place + 0.5) + 6, x, first + step * (place + 1.5) - 6, "join")
            )
        level = after
    parts.append(_whole("measured", part["speedup"], scale, left, bottom - step * 0.5, "measured"))
    words = f"{name}: from a ceiling of {number(part['ceiling'])} to a measured speedup of {number(part['speedup'])}"
    return drawing(bottom + 22, words, parts)


def _whole(words: str, value: float, scale: Scale, left: float, y: float, class_: str) -> Html:
    return tag(
        "g",
        label(left - 10, y + 3.8, words, "name", "end"),
        rect(scale(0), y - 6, scale(value) - scale(0), 12, f"bar {class_}", 1.5),
        label(WIDTH - 2, y + 3.8, f"{number(value)}\u00d7", "value", "end"),
        class_="strong",
    )


def _fall(term: Mapping[str, Any], before: float, after: float, scale: Scale, left: float, y: float) -> Html:
    low, high = sorted((scale(before), scale(after)))
    quiet = abs(term["factor"] - 1.0) < NOTHING
    kind = "rest" if term["name"] in RESTS else "gain" if after > before else "loss"
    words = WORDS.get(term["name"], term["name"])
    said = f"{words}: factor {number(term['factor'], 3)}, 95% interval {number(term['ci95'][0], 3)} to {number(term['ci95'][1], 3)}"
    return tag(
        "g",
        tag("title", said),
        label(left - 10, y + 3.8, fitted(words, left - 10, SMALL), "name", "end"),
        rect(low, y - 6, max(1.5, high - low), 12, f"bar {kind}", 1.5),
        label(WIDTH - 2, y + 3.8, f"\u00d7{number(term['factor'])}", "value", "end"),
        class_="quiet" if quiet else None,
    )


def reliability(name: str, bins: Sequence[Mapping[str, Any]]) -> Html:
    """Accepted share over confidence: a dot per bin, its area by how many drafts are in it; the diagonal is what should be."""
    left, top, size = 36.0, 26.0, 236.0
    scale = Scale(0.0, 1.0, left, left + size)
    rise = Scale(0.0, 1.0, top + size, top)
    parts: list[Content] = [label(0, 12, "accepted", "axis")]
    for value in (0.0, 0.25, 0.5, 0.75, 1.0):
        words = f"{100 * value:.0f}%"
        parts += [
            line(left, rise(value), left + size, rise(value), "rule"),
            label(left - 6, rise(value) + 3.8, words, "tick", "end"),
            label(scale(value), top + size + 16, words, "tick", "middle"),
        ]
    parts.append(line(scale(0), rise(0), scale(1), rise(1), "reference"))
    parts.append(label(left + size / 2, top + size + 32, "confidence", "axis", "middle"))
    most = max((cell["count"] for cell in bins), default=1) or 1
    for cell in bins:
        if not cell["count"]:
            continue
        x, y = scale(cell["confidence"]), rise(cell["accepted"])
        radius = 2.0 + 9.0 * (cell["count"] / most) ** 0.5
        words = f"{cell['count']} drafts: confidence {100 * cell['confidence']:.0f}%, accepted {100 * cell['accepted']:.0f}%"
        parts.append(line(x, rise(cell["confidence"]), x, y, "miss"))
        parts.append(
            tag(
                "circle",
                tag("title", words),
                cx=coordinates(x),
                cy=coordinates(y),
                r=coordinates(radius),
                class_="bubble",
            )
        )
    return drawing(
        top + size + 38, f"{name}: accepted share of drafts by confidence", parts
    )
