"""The patterns of a schema's strings, as rules of a grammar.

xgrammar 0.2.8 is wrong about some patterns within a schema: `a(b|)|a` allows `abb`, and `(ab+)?c`
allows `bc`. Its rules for a regular expression alone are right. They spell the text itself, so here
they are made to spell it as it stands within a JSON string: with escapes for quotes, backslashes
and control characters.
"""

from __future__ import annotations

import json
import re

PIECE = re.compile(r'"((?:\\.|[^"\\])*)"|\[(\^?)((?:\\.|[^\]\\])*)\]|\broot', re.DOTALL)
"""A text, a class of characters or the name of a rule, as xgrammar prints them."""
LETTER = r"\\x[0-9a-f]{2}|\\u[0-9a-f]{4}|\\U[0-9a-f]{8}|\\.|[^\\]"
LETTERS = re.compile(LETTER, re.DOTALL)
RANGES = re.compile(f"({LETTER})(?:-({LETTER}))?", re.DOTALL)
ESCAPES = dict(zip("0abtnvfre", b"\0\a\b\t\n\v\f\r\x1b", strict=True))
LAST = 0x10FFFF
"""The last character."""
CONTROL = (0, 0x1F)
ESCAPED = tuple(map(ord, '"\\'))
"""Characters besides `CONTROL` that JSON escapes."""
Ranges = list[tuple[int, int]]


def string_rules(rules: str, name: str) -> str:
    """The rules of a regular expression, as xgrammar prints them, for a text within a JSON string.
    name: of the first rule; its others begin with it."""

    def piece(found: re.Match[str]) -> str:
        text, negated, letters = found.groups()
        if text is not None:
            return _quoted("".join(chr(_code(letter)) for letter in LETTERS.findall(text)))
        if letters is not None:
            return _class(letters, bool(negated))
        return name

    return PIECE.sub(piece, rules)


def _class(letters: str, negated: bool) -> str:
    """A choice of one character. Control characters are left out unless there are no others."""
    given = [(_code(low), _code(high or low)) for low, high in RANGES.findall(letters)]
    left_out = given if negated else _others(given)
    plain = _others([*left_out, CONTROL, *((code, code) for code in ESCAPED)])
    options = ["[" + "".join(f"\\U{low:08x}-\\U{high:08x}" for low, high in plain) + "]"]
    for code in (*ESCAPED, *(() if plain else range(CONTROL[1] + 1))):
        if not any(low <= code <= high for low, high in left_out):
            options.append(_quoted(chr(code)))
    return "(" + " | ".join(options) + ")"


def _others(ranges: Ranges) -> Ranges:
    """The characters in none of the ranges."""
    found, start = [], 0
    for low, high in sorted(ranges):
        if start < low:
            found.append((start, low - 1))
        start = max(start, high + 1)
    return [*found, (start, LAST)] if start <= LAST else found


def _code(letter: str) -> int:
    """The code point of a character as xgrammar prints it."""
    if len(letter) > 2:
        return int(letter[2:], 16)
    return ESCAPES.get(letter[1], ord(letter[1])) if len(letter) == 2 else ord(letter)


def _quoted(text: str) -> str:
    """A text as a grammar has it that writes it within a JSON string."""
    return json.dumps(json.dumps(text, ensure_ascii=False)[1:-1], ensure_ascii=False)
