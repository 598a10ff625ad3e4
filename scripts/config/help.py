"""`headstart <stage> --help [group]`: the groups that a stage reads, their options, and its keys,
each with its value, its meaning and the values that it allows.

Without a group: the keys that are set most often, and a line per group. `--help all` shows every
key. The values are those of the composed YAML, so overrides beside `--help` show their effect.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from heads.api.errors import UserError, suggest
from scripts.config.compose import compose_stage, options, parse
from scripts.config.fields import Field, group_fields, group_meaning, spelt
from scripts.config.stages import OPTION_GROUPS, RECIPE_GROUPS, Stage

ALL = "all"


def stage_help(stage: Stage, overrides: list[str], topic: str) -> str:
    """The help text of a stage for the configuration that the overrides compose. topic: one of its
    groups, `all`, or empty. Raises `UserError` for any other topic."""
    if topic and topic != ALL and topic not in stage.groups:
        raise UserError(
            f"--help {topic}: stage '{stage.name}' does not read such a group."
            f"{suggest(topic, [*stage.groups, ALL])}"
        )
    values, choices = compose_stage(stage, parse(overrides))
    asked = stage.groups if topic in ("", ALL) else (topic,)
    keys = [line for group in asked for line in key_lines(group, values[group])]
    if topic not in ("", ALL):
        named = [group_line(topic, choices), ""] if topic in OPTION_GROUPS else []
        return "\n".join([f"{topic}: {group_meaning(topic)}", *named, *map(text, keys)])
    lines = [
        f"headstart {stage.name}: {stage.summary}",
        "",
        f"usage: headstart {stage.name} [group=option] [key=value] ...",
        f"       headstart {stage.name} --help <group>  the keys of a group; --help all: every key",
        f"       headstart {stage.name} --show [...]    all settings, without running; "
        "--show=changed: without defaults",
        f"       headstart {stage.name} -m key=a,b      every combination of the listed values",
        "",
        "groups (group=option; the option in use is marked):",
    ]
    for group in OPTION_GROUPS:
        if group in stage.groups or group in RECIPE_GROUPS:
            lines.append(group_line(group, choices))
    if topic == ALL:
        lines += ["", "keys (key=value; the values are those in use):", *map(text, keys)]
        return "\n".join(lines)
    common = [line for line in keys if line[0] in stage.common]
    lines += ["", "keys most often set (key=value; the values are those in use):"]
    lines += map(text, sorted(common, key=lambda line: stage.common.index(line[0])))
    lines += ["", f"all keys: headstart {stage.name} --help <group>, of these groups:"]
    for group in stage.groups:
        count = sum(key.split(".")[0] == group for key, _, _ in keys)
        lines.append(f"  {group:<11} {count:>3} keys  {group_meaning(group)}")
    return "\n".join(lines)


def group_line(group: str, choices: Mapping[str, Any]) -> str:
    """The options of a group; those in use are marked."""
    choice = choices.get(group)
    chosen = choice if isinstance(choice, list) else [choice]
    marked = [f"{name}*" if name in chosen else name for name in options(group)]
    return f"  {group:<11} {', '.join(marked)}"


def key_lines(group: str, values: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Dotted key, current value and meaning of every key of a group."""

    def walk(prefix: str, found: Sequence[Field], inner: Any) -> Iterator[tuple[str, str, str]]:
        for item in found:
            key = f"{prefix}.{item.name}"
            if item.below:
                yield from walk(key, item.below, inner.get(item.name) or {})
                continue
            value = spelt(inner[item.name]) if item.name in inner else item.default
            allowed = f" [{item.allowed}]" if item.allowed else ""
            yield key, value, f"{' '.join(item.meaning.split())}{allowed}".strip()

    yield from walk(group, group_fields(group, values), values)


def text(line: tuple[str, str, str]) -> str:
    """A key as help prints it."""
    key, value, meaning = line
    return f"  {key} = {value}" + (f"\n      {meaning}" if meaning else "")
