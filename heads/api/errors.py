"""The one base class for mistakes that a person can correct.

The command line prints such an error as a single message without a traceback; everything else is
our own bug and keeps its traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """A problem in what was given: the message says what, what is allowed and what to do."""


def suggest(given: str, allowed: Iterable[str]) -> str:
    """Return " Did you mean 'x'? Allowed: a, b, x." for a name that is not among `allowed`."""
    names = sorted(set(allowed))
    close = difflib.get_close_matches(given, names, n=1)
    hint = f" Did you mean '{close[0]}'?" if close else ""
    return f"{hint} Allowed: {', '.join(names) or 'nothing'}."
