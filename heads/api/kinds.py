"""Where kinds of drafters are defined, found without importing any: modules in `heads`, and entry
points of installed packages."""

from __future__ import annotations

import pkgutil
import sys
from functools import cache
from importlib.metadata import EntryPoint, entry_points

import heads
from heads.api.errors import UserError, suggest

ENTRY_POINTS = "headstart.kinds"
"""Group of entry points from a kind's name to its module."""


def kind_names() -> list[str]:
    """Names of all kinds, sorted, without importing them."""
    return sorted({*own_kinds(), *offered_kinds(tuple(sys.path))})


def own_kinds() -> list[str]:
    """Names of the kinds in `heads`."""
    modules = pkgutil.iter_modules(heads.__path__)
    return [m.name for m in modules if not m.ispkg and not m.name.startswith("_")]


@cache
def offered_kinds(path: tuple[str, ...]) -> dict[str, tuple[EntryPoint, ...]]:
    """Kinds that installed packages offer, by name. path: sys.path; a change renews the result."""
    found: dict[str, tuple[EntryPoint, ...]] = {}
    for point in entry_points(group=ENTRY_POINTS):
        found[point.name] = tuple(dict.fromkeys((*found.get(point.name, ()), point)))
    return found


def find_kind(name: str) -> str | EntryPoint:
    """Where a kind is defined: the name of its module in `heads`, or the entry point that offers
    it. Raises `UserError`, with suggestions, when there is no such kind or more than one."""
    offered = offered_kinds(tuple(sys.path)).get(name, ())
    own = (f"heads.{name}",) if name in own_kinds() else ()
    places = (*own, *(point.value for point in offered))
    if not places:
        raise UserError(f"there is no drafter kind '{name}'.{suggest(name, kind_names())}")
    if len(places) > 1:
        raise UserError(
            f"{len(places)} drafter kinds are called '{name}': {', '.join(places)}. Uninstall the "
            "packages that you do not want, or let their authors choose another name."
        )
    return own[0] if own else offered[0]
