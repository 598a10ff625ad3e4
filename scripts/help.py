"""`headstart <stage> --help`: the groups a stage reads, their options, and every key with its value and its meaning.

The values are those of the composed YAML, so overrides before `--help` show their effect. The meanings are the docstrings under the
dataclasses' fields, read from the source without importing it.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from scripts.config import CONSUMERS, REPOSITORY, compose_stage, options, plain
from scripts.stages import OPTION_GROUPS, RECIPE_GROUPS, Stage


@dataclass(frozen=True)
class Field:
    """One key of a group as written in its dataclass: name, type, default (source text), meaning, and the keys below it when its
    type is a dataclass itself."""

    name: str
    kind: str
    default: str
    meaning: str
    below: tuple[Field, ...] = ()


def stage_help(stage: Stage, overrides: list[str]) -> str:
    """The help text of a stage, for the configuration that `overrides` compose."""
    composed, choices = compose_stage(stage, overrides)
    lines = [
        f"headstart {stage.name}: {stage.summary}",
        "",
        "usage: headstart " + stage.name + " [group=option] [key=value] ...",
    ]
    lines += [
        "       -m with listed values (key=a,b) runs every combination; --show prints the composed configuration",
        "",
    ]
    lines += ["groups (group=option; the option in use is marked):"]
    for group in OPTION_GROUPS:
        if group in stage.groups or group in RECIPE_GROUPS:
            lines.append(
                f"  {group:<11} {', '.join(mark(name, choices.get(group)) for name in options(group))}"
            )
    lines += ["", "keys (key=value; the values are those in use):"]
    for group in stage.groups:
        lines += [
            f"  {key} = {value}{meaning}" for key, value, meaning in keys(group, plain(composed, group))
        ]
    return "\n".join(lines)


def mark(name: str, choice: Any) -> str:
    """An option, starred when it is the chosen one."""
    chosen = choice if isinstance(choice, list) else [choice]
    return f"{name}*" if name in chosen else name


def keys(group: str, values: Any) -> Iterator[tuple[str, str, str]]:
    """Dotted key, value in use, and meaning of every key of a group."""
    yield from _keys(group, group_fields(group, values), values)


def _keys(prefix: str, found: Sequence[Field], values: Any) -> Iterator[tuple[str, str, str]]:
    for item in found:
        if item.below:
            yield from _keys(f"{prefix}.{item.name}", item.below, values.get(item.name) or {})
            continue
        shown = spelt(values[item.name]) if item.name in values else item.default
        meaning = " ".join(item.meaning.split())
        yield f"{prefix}.{item.name}", shown, f"\n      {meaning}" if meaning else ""


def spelt(value: Any) -> str:
    """A value as one would write it on the command line."""
    return value if isinstance(value, str) and value else json.dumps(value)


def group_fields(group: str, values: Any) -> list[Field]:
    """The fields of a group's dataclass; for `head` those of the chosen kind."""
    if group == "head":
        kind = str(values.get("kind"))
        own = [Field("kind", "str", kind, f"Drafter kind: heads/{kind}.py.")]
        spec = find_spec(f"heads.{kind}")  # also finds kinds in folders that were added to heads.__path__
        return own + (fields_of(Path(spec.origin), "Config") if spec and spec.origin else [])
    module, name = CONSUMERS[group].split(":")
    return fields_of(source_of(module), name)


@cache
def fields_of(file: Path, name: str) -> list[Field]:
    """Fields and their docstrings of a dataclass that a source file defines or imports, inherited ones first; empty when it does
    neither.
    """
    if not file.is_file():
        return []
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            inherited = [
                field
                for base in node.bases
                if isinstance(base, ast.Name)
                for field in fields_of(file, base.id)
            ]
            found = class_fields(node)
            return inherited + [replace(item, below=tuple(below(file, item.kind))) for item in found]
        if isinstance(node, ast.ImportFrom) and any(
            (alias.asname or alias.name) == name for alias in node.names
        ):
            return fields_of(source_of(str(node.module)), name)
    return []


def below(file: Path, kind: str) -> list[Field]:
    """The keys of a field's type, when that is a dataclass of this repository."""
    return fields_of(file, kind) if kind.isidentifier() and kind not in PLAIN else []


def source_of(module: str) -> Path:
    """The file of a module of this repository."""
    return REPOSITORY / Path(*module.split(".")).with_suffix(".py")


PLAIN = ("int", "float", "bool", "str", "Any", "Path")


def class_fields(node: ast.ClassDef) -> Iterator[Field]:
    """Annotated assignments of a class body, each with the string that follows it."""
    for place, item in enumerate(node.body):
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            follower = node.body[place + 1] if place + 1 < len(node.body) else None
            meaning = ""
            if isinstance(follower, ast.Expr) and isinstance(follower.value, ast.Constant):
                meaning = str(follower.value.value)
            default = "???" if item.value is None else default_text(item.value)
            yield Field(item.target.id, ast.unparse(item.annotation), default, meaning)


def default_text(node: ast.expr) -> str:
    """A default value as one would write it on the command line; a factory is named by what it makes."""
    try:
        return spelt(ast.literal_eval(node))
    except ValueError:
        return "{}" if "default_factory=dict" in ast.unparse(node) else ast.unparse(node)
