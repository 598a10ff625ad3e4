"""Quotes text (names, domains, commands, ids) for Markdown: the text neither becomes markup or HTML
nor breaks a table. The Hub cleans HTML; other viewers of a card or a report may not."""

from __future__ import annotations

MARKUP = (("&", "&amp;"), ("<", "&lt;"), ("|", "\\|"), ("](", "]\\("))


def one_line(text: object) -> str:
    """`text` without line breaks and other characters that are not printable."""
    return "".join(sign if sign.isprintable() else " " for sign in str(text))


def escape(text: object) -> str:
    """`text` for a line or a cell of Markdown. Emphasis is not escaped: our own cells contain it,
    and it is harmless."""
    line = one_line(text)
    for sign, written in MARKUP:
        line = line.replace(sign, written)
    return line


def code(text: object) -> str:
    """`text` as a code span, with any backticks in it. The result is valid in a table's cell."""
    line = one_line(text).replace("|", "\\|")
    if "`" not in line:
        return f"`{line}`"
    ticks = "`" * (max(map(len, _runs(line))) + 1)
    return f"{ticks} {line} {ticks}"


def fence(text: str) -> str:
    """Backticks that open and close a block of code with this text, with any backticks in it."""
    return "`" * max(3, 1 + max(map(len, _runs(text)), default=0))


def _runs(text: str) -> list[str]:
    """The runs of backticks in a text."""
    return "".join(sign if sign == "`" else " " for sign in text).split()
