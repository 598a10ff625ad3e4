"""What Markdown quotes (names, domains, commands, ids) as text: it neither becomes markup or HTML
nor breaks a table. The Hub cleans HTML; other viewers of a card or a report may not."""

from __future__ import annotations

MARKUP = (("&", "&amp;"), ("<", "&lt;"), ("|", "\\|"), ("](", "]\\("))


def one_line(text: object) -> str:
    """`text` without line breaks and other signs that are not printed."""
    return "".join(sign if sign.isprintable() else " " for sign in str(text))


def escape(text: object) -> str:
    """`text` for a line or a cell of Markdown. Emphasis is left: our own cells have it, and it
    harms nobody."""
    line = one_line(text)
    for sign, written in MARKUP:
        line = line.replace(sign, written)
    return line


def code(text: object) -> str:
    """`text` as a code span, whatever backticks it has. A table's cell may hold it."""
    line = one_line(text).replace("|", "\\|")
    if "`" not in line:
        return f"`{line}`"
    ticks = "`" * (max(map(len, _runs(line))) + 1)
    return f"{ticks} {line} {ticks}"


def fence(text: str) -> str:
    """Backticks that open and close a block of code with this text, whatever backticks it has."""
    return "`" * max(3, 1 + max(map(len, _runs(text)), default=0))


def _runs(text: str) -> list[str]:
    """The runs of backticks in a text."""
    return "".join(sign if sign == "`" else " " for sign in text).split()
