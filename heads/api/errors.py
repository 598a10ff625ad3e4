"""The one base class for mistakes that a user can correct.

The command line prints such an error as a single message without a traceback. Any other error is a
bug in Headstart and keeps its traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path

MOST_NAMED = 20
"""Folders that a message lists."""


class UserError(ValueError):
    """A problem in the input: the message says what is wrong, what is allowed and what to do."""


def missing_folder(path: Path) -> str:
    """A message that a folder does not exist, with similar folders or those that exist there."""
    parent, name = path.parent, path.name
    while not parent.is_dir():
        parent, name = parent.parent, parent.name
    try:
        folders = (item.name for item in parent.iterdir() if item.is_dir())
        names = sorted(folder for folder in folders if not folder.startswith("."))
    except OSError:
        names = []
    if not names or len(names) > MOST_NAMED or not path.parent.parts:
        close = difflib.get_close_matches(name, names, n=1)
        near = f" Did you mean '{close[0]}'?" if close else ""
    else:
        near = suggest(name, names).replace("Allowed:", f"'{parent}' holds:")
    return f"there is no folder '{path}'.{near}"


def suggest(given: str, allowed: Iterable[str]) -> str:
    """Return " Did you mean 'x'? Allowed: a, b, x." for a name that is not among `allowed`."""
    names = sorted(set(allowed))
    close = difflib.get_close_matches(given, names, n=1)
    hint = f" Did you mean '{close[0]}'?" if close else ""
    return f"{hint} Allowed: {', '.join(names) or 'nothing'}."
