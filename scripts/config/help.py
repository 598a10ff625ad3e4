"""`headstart <stage> --help`: the groups a stage reads, their options, and every key with its
value, its meaning and what it allows.

The values are those of the composed YAML, so overrides before `--help` show their effect. The
meanings are the docstrings under the dataclasses' fields, read from the source without importing
it; what is allowed stands in their types.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import annotated_types

from heads.api import config as bounds
from scripts.config.compose import REPOSITORY, compose_stage, options, parse
from scripts.config.stages import OPTION_GROUPS, RECIPE_GROUPS, Stage

SCHEMA = Path(__file__).with_name("schema.py")


@dataclass(frozen=True)
class Field:
    """One key of a group as written in its dataclass."""

    name: str
    kind: str
    """The type, as source text."""
    default: str
    """The default, as source text."""
    meaning: str
    below: tuple[Field, ...] = ()
    """The keys of the type, when that is a dataclass itself."""
    allowed: str = ""
    """Which values the type allows, in words; empty where that is all of them."""


def stage_help(stage: Stage, overrides: list[str]) -> str:
    """The help text of a stage, for the configuration that `overrides` compose."""
    composed = compose_stage(stage, parse(overrides))
    lines = [
        f"headstart {stage.name}: {stage.summary}",
        "",
        "usage: headstart " + stage.name + " [group=option] [key=value] ...",
    ]
    lines += [
        "       -m with listed values (key=a,b) runs every combination; --show prints the composed "
        "configuration",
        "",
    ]
    lines += ["groups (group=option; the option in use is marked):"]
    for group in OPTION_GROUPS:
        if group in stage.groups or group in RECIPE_GROUPS:
            lines.append(
                f"  {group:<11} "
                + ", ".join(mark(name, composed.choices.get(group)) for name in options(group))
            )
    lines += ["", "keys (key=value; the values are those in use):"]
    for group in stage.groups:
        lines += [
            f"  {key} = {value}{meaning}"
            for key, value, meaning in keys(group, composed.values[group])
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
        meaning += f" [{item.allowed}]" if item.allowed else ""
        yield f"{prefix}.{item.name}", shown, f"\n      {meaning}" if meaning else ""


def spelt(value: Any) -> str:
    """A value as one would write it on the command line."""
    return value if isinstance(value, str) and value else json.dumps(value)


def group_fields(group: str, values: Any) -> list[Field]:
    """The fields of a group's dataclass; for `head` those of the chosen kind."""
    if group == "head":
        kind = str(values.get("kind"))
        own = [Field("kind", "str", kind, f"Drafter kind: heads/{kind}.py.")]
        spec = find_spec(
            f"heads.{kind}"
        )  # also finds kinds in folders that were added to heads.__path__
        return own + (fields_of(Path(spec.origin), "Config") if spec and spec.origin else [])
    entries = {item.name.rstrip("_"): item for item in fields_of(SCHEMA, "Settings")}
    return list(entries[group].below)


@cache
def fields_of(file: Path, name: str) -> list[Field]:
    """Fields and their docstrings of a dataclass that a source file defines or imports, inherited
    ones first; empty when it does neither."""
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
            return inherited + [
                replace(item, below=tuple(below(file, item.kind)), allowed=allowed(file, item.kind))
                for item in class_fields(node)
            ]
        if isinstance(node, ast.ImportFrom) and any(
            (alias.asname or alias.name) == name for alias in node.names
        ):
            return fields_of(source_of(str(node.module)), name)
    return []


def below(file: Path, kind: str) -> list[Field]:
    """The keys of a field's type, when that is a dataclass of this repository."""
    return fields_of(file, kind) if kind.isidentifier() and kind not in PLAIN else []


def allowed(file: Path, kind: str) -> str:
    """What a type allows, in words: the options of a `Literal`, the limits of a type of
    heads.api.config."""
    node = type_node(file, kind)
    if node is None:
        return ""
    names = {item.id: item for item in ast.walk(node) if isinstance(item, ast.Name)}
    if "Literal" in names:
        options = [item.value for item in ast.walk(node) if isinstance(item, ast.Constant)]
        return "one of " + ", ".join(str(option) for option in options if option is not None)
    found = [name for name in names if name in bounds.BOUNDED]
    marks = [
        getattr(annotated_types, ast.unparse(item.func))(ast.literal_eval(item.args[0]))
        for item in ast.walk(node)
        if isinstance(item, ast.Call)
    ]
    if not found and not marks:
        return ""
    hint = getattr(bounds, found[0]) if found else Annotated[(float, *marks)]
    words = bounds.limits(hint)
    words = words.replace("not be negative", "0 or more")
    return words.removeprefix("be ").removeprefix("lie ")


def type_node(file: Path, kind: str) -> ast.expr | None:
    """The expression of a type; a name is followed to the assignment that gives it."""
    node = ast.parse(kind, mode="eval").body
    if not isinstance(node, ast.Name) or kind in PLAIN or kind in bounds.BOUNDED:
        return node
    for item in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(item, ast.Assign) and ast.unparse(item.targets[0]) == kind:
            return item.value
        if isinstance(item, ast.ImportFrom) and kind in [alias.name for alias in item.names]:
            other = source_of(str(item.module))
            return type_node(other, kind) if other.is_file() else None
    return None


def source_of(module: str) -> Path:
    """The file of a module of this repository."""
    return REPOSITORY / Path(*module.split(".")).with_suffix(".py")


PLAIN = ("int", "float", "bool", "str", "Any", "Path")
"""Types without keys of their own."""


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
    """A default value as one would write it on the command line; a factory is named by what it
    makes."""
    try:
        return spelt(ast.literal_eval(node))
    except ValueError:
        return "{}" if "default_factory=dict" in ast.unparse(node) else ast.unparse(node)
