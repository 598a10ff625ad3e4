"""From numbers to places on paper: linear and logarithmic scales with round ticks, and short texts that fit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)
LETTER = 0.53
"""Width of a letter as a share of its size, on average."""


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers from at most `low` to at least `high`, about so many."""
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
        """A linear scale over the values, widened to round ticks, and these. zero: begin at 0."""
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


def shown(value: float) -> str:
    """A tick's text: no more digits than it has."""
    return f"{value:g}".replace("-", "\u2212")


def fitted(words: str, width: float, size: float) -> str:
    """`words`, cut with an ellipsis where they are wider than `width` at letters of `size`."""
    room = max(2, int(width / (size * LETTER)))
    return words if len(words) <= room else words[: room - 1] + "\u2026"


def spread(places: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Places moved apart to at least `gap`, in their order, within [low, high] as far as there is room."""
    order = sorted(range(len(places)), key=lambda i: places[i])
    moved = list(places)
    for before, here in pairwise(order):
        moved[here] = max(moved[here], moved[before] + gap)
    if order and moved[order[-1]] > high:
        moved[order[-1]] = high
        for here, after in zip(reversed(order[:-1]), reversed(order), strict=False):
            moved[here] = min(moved[here], moved[after] - gap)
    return [max(low, place) for place in moved]
