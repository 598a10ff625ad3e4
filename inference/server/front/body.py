"""Reads the JSON of a request. Invalid content is refused with the reason."""

from __future__ import annotations

import json
import re
from typing import Any

from inference.server.errors import ApiError

MOST_DIGITS = 40
"""Most digits of a whole number; seeds, the largest meaningful ones, have 19."""
DEEPEST = 64
"""Most levels of lists and objects."""
MARKS = re.compile(r'"(?:[^"\\]++|\\.)*+"?|[\[\]{}]', re.DOTALL)
"""A text, or a bracket outside texts."""


def read_json(body: bytes) -> Any:
    """The value in a body. Raises `ApiError` (400) for invalid JSON, and for JSON that no sensible
    request contains: whole numbers of more than `MOST_DIGITS` digits, more than `DEEPEST` levels,
    texts with half a surrogate pair."""
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _refusal(f"the body is not UTF-8 (byte {error.start}).") from error
    # only the few requests with so many brackets are searched
    if text.count("[") + text.count("{") > DEEPEST and _is_deep(text):
        raise _refusal(f"the body has more than {DEEPEST} levels of lists and objects.")
    try:
        value = json.loads(text, parse_int=_whole, parse_constant=_constant)
    except json.JSONDecodeError as error:
        raise _refusal(f"the body is not JSON ({error.msg}, character {error.pos}).") from error
    if "\\u" in text:  # only an escape can give half a pair: UTF-8 contains none
        _require_unicode(value)
    return value


def _refusal(message: str, param: str | None = None) -> ApiError:
    return ApiError(400, message, param, code="invalid_json")


def _is_deep(text: str) -> bool:
    """Whether more than `DEEPEST` levels are open at once; brackets within texts do not count."""
    depth = 0
    for found in MARKS.finditer(text):
        sign = found[0]
        if sign in ("[", "{"):
            depth += 1
            if depth > DEEPEST:
                return True
        elif sign in ("]", "}"):
            depth -= 1
    return False


def _whole(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise _refusal(f"a whole number has {len(digits)} digits; {MOST_DIGITS} are the most here.")
    return int(digits)


def _constant(name: str) -> float:
    raise _refusal(f"{name} is no number of JSON.")


def _require_unicode(value: Any) -> None:
    """Raise `ApiError` for half a surrogate pair anywhere; the error names the parameter."""
    members = value.items() if isinstance(value, dict) else [(None, value)]
    for name, member in members:
        if not _is_unicode(name or ""):
            raise _refusal("a parameter's name is not valid Unicode (half a surrogate pair).")
        if not _is_unicode(json.dumps(member, ensure_ascii=False)):
            what = f"'{name}'" if name else "the body"
            raise _refusal(f"{what} is not valid Unicode (half a surrogate pair).", name)


def _is_unicode(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
