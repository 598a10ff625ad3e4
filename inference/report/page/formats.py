"""Formats numbers and foreign text for the page."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from jinja2.utils import htmlsafe_json_dumps
from markupsafe import Markup

CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
DIRECTION = re.compile(r"[\u202a-\u202e\u2066-\u2069]")
LETTER = 0.53
"""Mean width of a letter as a share of its size."""
SMALL = 11.0
"""Size of the letters in drawings."""


def clean(value: Any) -> Any:
    """Text, also inside lists and objects, without characters that are not allowed in a page.

    Control characters and lone surrogates become replacement characters. Marks that change the
    direction of writing become their escapes.
    """
    if isinstance(value, Markup):
        return value
    if isinstance(value, str):
        text = CONTROL.sub("\ufffd", value.replace("\r\n", "\n").replace("\r", "\n"))
        return DIRECTION.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
    if isinstance(value, dict):
        return {clean(key): clean(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [clean(item) for item in value]
    return value


def finalize(value: Any) -> Any:
    """The written form of a template's expression, before it is escaped.

    None is written as an empty string. Floats are coordinates of drawings and have one decimal;
    other numbers are already formatted.
    """
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.1f}".removesuffix(".0")
    return clean(value) if isinstance(value, str) else value


def to_json(value: Any) -> Markup:
    """`value` as JSON that is safe inside a script element: nothing in it can end the element."""
    return htmlsafe_json_dumps(clean(value), ensure_ascii=False, separators=(",", ":"))


def number(value: float, digits: int = 2) -> str:
    """ "1,234.50", with a true minus sign."""
    return f"{value:,.{digits}f}".replace("-", "\u2212")


def interval(bounds: Sequence[float], digits: int = 2) -> str:
    """ "1.52 to 1.74"."""
    return f"{number(bounds[0], digits)} to {number(bounds[1], digits)}"


def claimed(bounds: Sequence[float], verdict: str) -> str:
    """The interval of a speedup: "1.52 to 1.74", or "0.82 to 2.31, no difference shown"."""
    return ", ".join(filter(None, (interval(bounds), verdict)))


def percent(share: float, digits: int = 0) -> str:
    """ "52%"."""
    return f"{100 * share:.{digits}f}%"


def share(value: float, bounds: Sequence[float]) -> str:
    """ "52.4% (49 to 56)"."""
    return f"{percent(value, 1)} ({100 * bounds[0]:.0f} to {100 * bounds[1]:.0f})"


def numbered(word: str, count: int) -> list[str]:
    """ "Depth 1", "Depth 2" and so on."""
    return [f"{word} {i + 1}" for i in range(count)]


def tick(value: float) -> str:
    """A number of an axis, without superfluous digits."""
    return f"{value:g}".replace("-", "\u2212")


def fit(words: str, width: float) -> str:
    """`words`, cut with an ellipsis where they are wider than `width` units of a drawing."""
    room = max(2, int(width / (SMALL * LETTER)))
    return words if len(words) <= room else words[: room - 1] + "\u2026"
