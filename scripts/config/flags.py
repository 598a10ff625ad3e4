"""The flags of the command line: Headstart's own, and those in Hydra's manual."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from heads.api.errors import UserError, suggest
from scripts.config.fields import keys_named
from scripts.config.stages import GROUPS

SPELLINGS = {
    "-h": "--help",
    "-m": "--multirun",
    "-r": "--run",
    "-c": "--cfg",
    "-i": "--info",
    "-p": "--package",
    "-sc": "--shell-completion",
    "-cd": "--config-dir",
    "-cn": "--config-name",
    "-cp": "--config-path",
}
SWITCHES = ("--multirun", "--run", "--plan", "--complete", "--resolve", "--hydra-help")
WITH_VALUE = {
    "--cfg": ("job", "hydra", "all"),
    "--info": ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath"),
    "--package": (),
    "--config-dir": (),
    "--config": (),
    "--show": ("all", "changed"),
    "--help": (),
}
"""Flags with a value -> the allowed values; an empty list allows any."""
OPTIONAL = {"--info": "all", "--show": "all", "--help": ""}
"""Flags with an optional value -> the default of that value."""
REFUSED = {
    "--config-name": "The primary config of a stage is fixed. Put a recipe of your own into "
    "<folder>/experiment/<name>.yaml and give --config-dir <folder> experiment=<name>.",
    "--config-path": "The folder conf/ is always searched. Add your own with --config-dir "
    "<folder>.",
    "--experimental-rerun": "Repeat the command instead: it continues where it stopped, and "
    "--config <file> runs settings that a loop has written.",
}
COMMANDS = ("--multirun", "--cfg", "--info", "--show", "--complete", "--hydra-help", "--help")
"""Flags that determine what is done with the settings. At most one is given; only --show and
--complete may be combined with --multirun."""


@dataclass
class Flags:
    """The arguments after the stage's name. values: flag -> its value, "" for a switch; the folders
    of several --config-dir are separated as in PATH."""

    values: dict[str, str] = field(default_factory=dict)
    overrides: list[str] = field(default_factory=list)

    def __contains__(self, name: str) -> bool:
        return name in self.values

    def get(self, name: str) -> str:
        """The value of a flag; empty if it is not given."""
        return self.values.get(name, "")


def read_flags(given: list[str], topics: tuple[str, ...] = ()) -> Flags:
    """Separate flags and overrides; raises `UserError` for an unknown flag. topics: words that may
    follow --help. A loop starts a stage in another process with `--config <file>`; the file
    contains all settings."""
    found, items = Flags(), list(given)
    while items:
        item = items.pop(0)
        if not item.startswith("-"):
            found.overrides.append(item)
            continue
        spelt, equals, value = item.partition("=")
        name = SPELLINGS.get(spelt, spelt)
        if name in REFUSED:
            raise UserError(f"{spelt} is not for this program. {REFUSED[name]}")
        if name in SWITCHES and not equals:
            found.values[name] = ""
        elif name in WITH_VALUE:
            allowed: tuple[str, ...] = topics if name == "--help" else WITH_VALUE[name]
            if not equals:
                value = take(name, items)
            require_value(name, value, allowed)
            if name == "--config-dir" and name in found:
                value = os.pathsep.join([found.get(name), value])
            found.values[name] = value
        else:
            raise UserError(f"there is no flag '{item}'.{nearest(spelt, value, topics)}")
    require_consistent(found.values, found.overrides)
    return found


def nearest(flag: str, value: str, topics: tuple[str, ...]) -> str:
    """A suggestion for an unknown flag: a setting, or another flag."""
    name = flag.lstrip("-").replace("-", "_")
    groups = [topic for topic in topics if topic in GROUPS]
    keys = [name] if name.split(".")[0] in groups else keys_named(name, groups)
    if keys:
        words = " or ".join(f"{key}={value or '...'}" for key in keys[:3])
        return f" Settings are given without dashes: {words}"
    found = suggest(flag, {*SWITCHES, *WITH_VALUE, *SPELLINGS})
    return f"{found} Settings are given without dashes, as key=value."


def take(name: str, items: list[str]) -> str:
    """The word after a flag, removed from the list; the default if the flag's value is optional."""
    follows = bool(items) and not items[0].startswith("-")
    if name not in OPTIONAL:
        return items.pop(0) if follows else ""
    value = follows and "=" not in items[0] and items[0][:1] not in "~+"
    return items.pop(0) if value else OPTIONAL[name]


def require_value(name: str, value: str, allowed: tuple[str, ...]) -> None:
    """Raise `UserError` for a missing value, or one that is not allowed."""
    if not value and name not in OPTIONAL:
        what = f"one of {', '.join(allowed)}" if allowed else "its value"
        if name == "--config":
            what = "the file with the settings"
        raise UserError(f"{name} is to be followed by {what}.")
    if allowed and name != "--help" and value not in allowed:
        raise UserError(f"{name} {value}: unknown.{suggest(value, allowed)}")


def require_consistent(values: Mapping[str, str], overrides: list[str]) -> None:
    """Raise `UserError` for flags that exclude one another."""
    if "--config" in values and (overrides or "--multirun" in values):
        raise UserError("--config holds all settings of a stage: give no others beside it.")
    unread = [name for name in ("--cfg", "--info", "--help", "--hydra-help") if name in values]
    if "--config" in values and unread:
        raise UserError(
            f"{unread[0]} does not read the file of --config. Give one of them; --show prints the "
            "settings in the file."
        )
    if ("--resolve" in values or "--package" in values) and "--cfg" not in values:
        raise UserError("--resolve and --package go with --cfg job, --cfg hydra or --cfg all.")
    commands = [name for name in COMMANDS if name in values]
    together = set(commands) <= {"--multirun", "--show", "--complete"}
    if len(commands) > 1 and not (together and "--multirun" in commands and len(commands) == 2):
        raise UserError(f"{' and '.join(commands)} do not go together: give one of them.")
