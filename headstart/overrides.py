"""Python values as settings of the command line: `optim={"lr": 1e-4}` becomes `optim.lr=0.0001`.

Both go through the same composition (`scripts.config`), so defaults, checks and messages are the
same.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from scripts.config.compose import options

PLAIN = re.compile(r"[A-Za-z_./][\w./@:-]*", re.ASCII)
"""Texts that Hydra's grammar reads as they are."""
WORDS = ("null", "true", "false", "nan", "inf")
"""Texts that it reads as another type."""


def spell(key: str, value: Any) -> str:
    """`key=value` as on the command line."""
    return f"{key}={spell_value(value)}"


def spell_value(value: Any) -> str:
    """A value in Hydra's grammar: texts are quoted where they could be read as something else."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (str, Path)):
        return spell_text(str(value))
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}: {spell_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(spell_value, value)) + "]"
    return str(value)


def spell_text(text: str) -> str:
    """A text, in quotes unless it is a plain word. `${` is escaped, so that it is no
    interpolation."""
    if PLAIN.fullmatch(text) and text.lower() not in WORDS:
        return text
    # backslashes count as escapes only before these
    escaped = re.sub(
        r'(\\*)("|\$\{|$)', lambda found: found[1] * 2 + "\\" * bool(found[2]) + found[2], text
    )
    return f'"{escaped}"'


def name_or_path(group: str, own: str, given: str | Path | Mapping[str, Any]) -> list[str]:
    """The override that chooses the option `given`, else those for option `own` with that path. A
    mapping sets keys of the group."""
    if isinstance(given, Mapping):
        return list(spell_groups({group: given}))
    if isinstance(given, str) and given in options(group):
        return [f"{group}={given}"]
    return [f"{group}={own}", spell(f"{group}.path", given)]


def spell_groups(settings: Mapping[str, Any]) -> Iterator[str]:
    """Keyword arguments as overrides: a mapping sets keys of its group, any other value chooses an
    option of it."""
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from spell_groups({f"{key}.{name}": item for name, item in value.items()})
        else:
            yield spell(key, value)
