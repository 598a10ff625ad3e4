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
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any

import annotated_types

from heads.api import config as bounds
from heads.api.kinds import find_kind
from scripts.config.compose import REPOSITORY, compose_stage, options, parse
from scripts.config.stages import OPTION_GROUPS, RECIPE_GROUPS, Stage

SCHEMA = Path(__file__).with_name("schema.py")


@dataclass(frozen=True)
class Field:
    """One key of a group as written in its dataclass."""

    name: str
    default: str
    """The default, as source text."""
    meaning: str
    below: tuple[Field, ...] = ()
    """The keys of the type, when that is a dataclass itself."""
    allowed: str = ""
    """Which values the type allows, in words; empty where that is all of them."""


def stage_help(stage: Stage, overrides: list[str]) -> str:
    """The help text of a stage for the configuration that the overrides compose."""
    values, choices = compose_stage(stage, parse(overrides))
    lines = [
        f"headstart {stage.name}: {stage.summary}",
        "",
        f"usage: headstart {stage.name} [group=option] [key=value] ...",
        "       -m with listed values (key=a,b) runs every combination; --show prints the composed "
        "configuration",
        "",
        "groups (group=option; the option in use is marked):",
    ]
    for group in OPTION_GROUPS:
        if group in stage.groups or group in RECIPE_GROUPS:
            choice = choices.get(group)
            chosen = choice if isinstance(choice, list) else [choice]
            marked = [f"{name}*" if name in chosen else name for name in options(group)]
            lines.append(f"  {group:<11} {', '.join(marked)}")
    lines += ["", "keys (key=value; the values are those in use):"]
    for group in stage.groups:
        lines += key_lines(f"  {group}", group_fields(group, values[group]), values[group])
    return "\n".join(lines)


def key_lines(prefix: str, found: Sequence[Field], values: Any) -> Iterator[str]:
    """Dotted key, value in use, and meaning of every key of a group."""
    for item in found:
        if item.below:
            yield from key_lines(f"{prefix}.{item.name}", item.below, values.get(item.name) or {})
            continue
        value = spelt(values[item.name]) if item.name in values else item.default
        yield f"{prefix}.{item.name} = {value}"
        allowed = f" [{item.allowed}]" if item.allowed else ""
        if item.meaning or allowed:
            yield f"      {' '.join(item.meaning.split())}{allowed}"


def spelt(value: Any) -> str:
    """A value as one would write it on the command line."""
    return value if isinstance(value, str) and value else json.dumps(value)


def group_fields(group: str, values: Any) -> list[Field]:
    if group == "head":
        kind = str(values.get("kind"))
        place = find_kind(kind)
        module = place if isinstance(place, str) else place.module
        own = [Field("kind", kind, f"Drafter kind: {module.replace('.', '/')}.py.")]
        # also finds kinds in folders that were added to heads.__path__
        spec = find_spec(module)
        return own + (fields_of(Path(spec.origin), "Config") if spec and spec.origin else [])
    entries = {item.name.rstrip("_"): item for item in fields_of(SCHEMA, "Settings")}
    return list(entries[group].below)


@cache
def fields_of(file: Path, name: str) -> list[Field]:
    """Fields of a dataclass that a source file defines or imports, inherited ones first."""
    if not file.is_file():
        return []
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
            inherited = [field for base in bases for field in fields_of(file, base)]
            return inherited + list(class_fields(file, node))
        if isinstance(node, ast.ImportFrom) and name in [
            alias.asname or alias.name for alias in node.names
        ]:
            return fields_of(source_of(str(node.module)), name)
    return []


def allowed(file: Path, kind: str) -> str:
    """What a type allows, in words: options of a `Literal`, or limits."""
    node = type_node(file, kind)
    if node is None:
        return ""
    names = [item.id for item in ast.walk(node) if isinstance(item, ast.Name)]
    if "Literal" in names:
        values = [item.value for item in ast.walk(node) if isinstance(item, ast.Constant)]
        return "one of " + ", ".join(str(value) for value in values if value is not None)
    found = [name for name in names if name in bounds.BOUNDED]
    marks = [
        getattr(annotated_types, ast.unparse(item.func))(ast.literal_eval(item.args[0]))
        for item in ast.walk(node)
        if isinstance(item, ast.Call)
    ]
    if not found and not marks:
        return ""
    hint = getattr(bounds, found[0]) if found else Annotated[(float, *marks)]
    words = bounds.limits(hint).replace("not be negative", "0 or more")
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
    return REPOSITORY / Path(*module.split(".")).with_suffix(".py")


PLAIN = ("int", "float", "bool", "str", "Any", "Path")
"""Types without keys of their own."""


def class_fields(file: Path, node: ast.ClassDef) -> Iterator[Field]:
    """Annotated assignments of a class body, each with the string that follows it."""
    for item, follower in zip_longest(node.body, node.body[1:]):
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            meaning, kind = "", ast.unparse(item.annotation)
            if isinstance(follower, ast.Expr) and isinstance(follower.value, ast.Constant):
                meaning = str(follower.value.value)
            default = "???" if item.value is None else default_text(item.value)
            below = fields_of(file, kind) if kind.isidentifier() and kind not in PLAIN else []
            yield Field(item.target.id, default, meaning, tuple(below), allowed(file, kind))


def default_text(node: ast.expr) -> str:
    """A default value as on the command line; a factory is named by what it makes."""
    try:
        return spelt(ast.literal_eval(node))
    except ValueError:
        return "{}" if "default_factory=dict" in ast.unparse(node) else ast.unparse(node)
