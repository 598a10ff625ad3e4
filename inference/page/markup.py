"""HTML and SVG from plain values: everything that is not markup of our own making is escaped, everywhere, without being asked to.

    tag("td", "a < b", class_="n")      ->  <td class="n">a &lt; b</td>

What comes from data (prompts, answers, names, paths) may hold anything: tags, quotes, control characters, half characters, marks
that turn the direction of writing. It becomes text, and nothing but text.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable
from typing import Any

VOID = {"meta", "link", "br", "hr", "input", "col", "wbr"}
CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
DIRECTION = re.compile(r"[\u202a-\u202e\u2066-\u2069]")


class Html(str):
    """Text that is markup already."""

    __slots__ = ()


Content = Any
"""Html, any other value (shown as escaped text), None (nothing), or an iterable of these."""


def plain(value: Any) -> str:
    """Text without what no page may hold: control and half characters become a replacement mark, direction marks their names."""
    cleaned = CONTROL.sub("\ufffd", str(value).replace("\r\n", "\n").replace("\r", "\n"))
    return DIRECTION.sub(lambda found: f"\\u{ord(found[0]):04x}", cleaned)


def text(value: Content) -> Html:
    """`value` as markup."""
    if value is None:
        return Html("")
    if isinstance(value, Html):
        return value
    if isinstance(value, Iterable) and not isinstance(value, str):
        return Html("".join(text(item) for item in value))
    return Html(html.escape(plain(value), quote=True))


def tag(name: str, /, *content: Content, **attributes: Any) -> Html:
    """An element. Of attributes' names a trailing underscore is dropped and others become hyphens; None and False are left out."""
    parts = [name]
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        written = key.removesuffix("_").replace("_", "-")
        parts.append(written if value is True else f'{written}="{html.escape(plain(value), quote=True)}"')
    opened = f"<{' '.join(parts)}>"
    return Html(opened if name in VOID else f"{opened}{text(content)}</{name}>")


def join(items: Iterable[Content]) -> Html:
    """Several pieces behind one another."""
    return text(list(items))


def data(value: Any) -> Html:
    """`value` as JSON inside a script element: no character in it can end the element or begin another."""
    written = json.dumps(_cleaned(value), ensure_ascii=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        written = written.replace(character, f"\\u{ord(character):04x}")
    return Html(written)


def _cleaned(value: Any) -> Any:
    if isinstance(value, str):
        return plain(value)
    if isinstance(value, dict):
        return {plain(key): _cleaned(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_cleaned(item) for item in value]
    return value


def number(value: float, digits: int = 2) -> str:
    """A number with a true minus sign and separated thousands."""
    return f"{value:,.{digits}f}".replace("-", "\u2212")


def interval(low: float, high: float, digits: int = 2) -> str:
    """ "1.52 to 1.74"."""
    return f"{number(low, digits)} to {number(high, digits)}"


def table(header: Iterable[Content], rows: Iterable[Iterable[Content]], caption: str, texts: int = 1) -> Html:
    """A table whose first cell of every row is its header, in a box that scrolls by itself. texts: left-aligned columns."""
    heads = [tag("th", cell, scope="col", class_=None if i < texts else "n") for i, cell in enumerate(header)]
    lines = []
    for row in rows:
        cells = [
            tag("th", cell, scope="row") if i == 0 else tag("td", cell, class_=None if i < texts else "n")
            for i, cell in enumerate(row)
        ]
        lines.append(tag("tr", cells))
    whole = tag("table", tag("caption", caption), tag("thead", tag("tr", heads)), tag("tbody", lines))
    return tag("div", whole, class_="scroll", tabindex="0", role="region", aria_label=caption)


def folded(summary: str, *content: Content, open_: bool = False) -> Html:
    """A part that opens when asked."""
    return tag("details", tag("summary", summary), content, open=open_)
