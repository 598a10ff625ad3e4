"""The keys of the configuration groups: names, defaults, meanings and allowed values.

They are read from the dataclasses' source without importing it, so that help, completion and the
suggestions in error messages need no heavy library. The meanings are the docstrings under the
fields; the types give the allowed values.
"""

from __future__ import annotations

import ast
import json
import runpy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from itertools import zip_longest
from pathlib import Path
from pkgutil import iter_modules
from typing import Annotated, Any

import annotated_types

import heads
from heads.api import config as bounds
from heads.api.kinds import find_kind

REPOSITORY = Path(__file__).resolve().parents[2]
SCHEMA = Path(__file__).with_name("schema.py")


@dataclass(frozen=True)
class Field:
    """One key of a group as written in its dataclass."""

    name: str
    default: str
    """The default, as source text."""
    meaning: str
    below: tuple[Field, ...] = ()
    """The keys of the type, if that is a dataclass."""
    allowed: str = ""
    """The values that the type allows, in words; empty if it allows all."""


def spelt(value: Any) -> str:
    """A value in the spelling of the command line."""
    return value if isinstance(value, str) and value else json.dumps(value)


def group_fields(group: str, values: Mapping[str, Any]) -> list[Field]:
    """The keys of a group; those of `head` follow from the kind in `values`."""
    if group == "head":
        kind = str(values.get("kind"))
        file = kind_module(kind).replace(".", "/")
        return [Field("kind", kind, f"Drafter kind: {file}.py."), *kind_fields(kind)]
    return list(entry(group).below)


def group_meaning(group: str) -> str:
    """The meaning of a group, in one sentence."""
    return entry(group).meaning


@cache
def entry(group: str) -> Field:
    """The group as a field of `Settings`; its meaning is the first sentence of its class."""
    file, node = find_class(SCHEMA, "Settings")
    assert file is not None and node is not None
    (annotated,) = (
        item
        for item in node.body
        if isinstance(item, ast.AnnAssign)
        and isinstance(item.target, ast.Name)
        and item.target.id.rstrip("_") == group
    )
    name = ast.unparse(annotated.annotation)
    owner = find_class(file, name)[1]
    meaning = " ".join((ast.get_docstring(owner) or "").split()) if owner else ""
    return Field(group, "", meaning.partition(". ")[0].rstrip("."), tuple(fields_of(file, name)))


def kind_fields(kind: str) -> list[Field]:
    """The keys of a kind's own configuration."""
    # also finds kinds in folders that were added to heads.__path__
    spec = find_spec(kind_module(kind))
    return fields_of(Path(spec.origin), "Config") if spec and spec.origin else []


def kind_module(kind: str) -> str:
    """The module of a kind, which may be another package's."""
    place = find_kind(kind)
    return place if isinstance(place, str) else place.module


def leaves(prefix: str, found: Sequence[Field]) -> Iterator[tuple[str, Field]]:
    """Every key below a prefix with its dotted path."""
    for item in found:
        if item.below:
            yield from leaves(f"{prefix}.{item.name}", item.below)
        else:
            yield f"{prefix}.{item.name}", item


def keys_named(name: str, groups: Sequence[str]) -> list[str]:
    """The dotted paths of the keys called `name` in the groups, shortest first: `lr` ->
    `optim.lr`. Keys of every drafter kind count for `head`."""
    found = []
    for group in groups:
        if group == "head":
            kinds = [item.name for item in iter_modules(heads.__path__) if not item.ispkg]
            keys = {item.name for kind in kinds for item in kind_fields(kind)}
            found += ["head.kind"] if name == "kind" else []
            found += [f"head.{name}"] if name in keys else []
        else:
            found += [
                key for key, _ in leaves(group, entry(group).below) if key.endswith(f".{name}")
            ]
    return sorted(found, key=lambda key: key.count("."))


@cache
def fields_of(file: Path, name: str) -> list[Field]:
    """Fields of a dataclass that a source file defines or imports, inherited ones first."""
    source, node = find_class(file, name)
    if source is None or node is None:
        return []
    bases = [ast.unparse(base) for base in reversed(node.bases)]
    found = [field for base in bases for field in fields_of(source, base)]
    # a field that is defined again keeps its place
    return list({field.name: field for field in (*found, *class_fields(source, node))}.values())


@cache
def find_class(file: Path, name: str) -> tuple[Path | None, ast.ClassDef | None]:
    """A class that a source file defines or imports, also as an attribute of an imported module,
    with the file that defines it."""
    owner, _, own = name.rpartition(".")
    if not file.is_file():
        return None, None
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return file, node
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                known = alias.asname or alias.name
                if known == name:
                    return find_class(source_of(str(node.module)), alias.name)
                if known == owner:
                    return find_class(source_of(f"{node.module}.{alias.name}"), own)
    return None, None


def allowed(file: Path, kind: str) -> str:
    """The values that a type allows, in words: options of a `Literal`, or limits."""
    node = type_node(file, kind)
    if node is None:
        return ""
    names = [item.id for item in ast.walk(node) if isinstance(item, ast.Name)]
    if "Literal" in names:
        values = listed(file, node)
        return "one of " + ", ".join(values) if values else ""
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


def listed(file: Path, node: ast.expr) -> list[str]:
    """All values of a type that is made of `Literal` and bool; empty if it has others too."""
    found = []
    for item in ast.walk(node):
        if isinstance(item, ast.Constant) and item.value not in (None, ...):
            found.append(spelt(item.value))
        elif isinstance(item, ast.Name) and item.id == "bool":
            found += ["true", "false"]
        elif isinstance(item, ast.Name) and item.id not in ("Literal", "tuple"):
            inner = type_node(file, item.id)
            values = [] if inner is None or isinstance(inner, ast.Name) else listed(file, inner)
            if not values:
                return []
            found += values
    return found


def type_node(file: Path, kind: str) -> ast.expr | None:
    """The expression of a type or a value; a name is followed to the assignment that gives it."""
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
"""Types without keys."""


def class_fields(file: Path, node: ast.ClassDef) -> Iterator[Field]:
    """Annotated assignments of a class body, each with the string that follows it."""
    for item, follower in zip_longest(node.body, node.body[1:]):
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            meaning, kind = "", ast.unparse(item.annotation)
            if isinstance(follower, ast.Expr) and isinstance(follower.value, ast.Constant):
                meaning = str(follower.value.value)
            default = "???" if item.value is None else default_text(file, item.value)
            below = fields_of(file, kind) if kind.isidentifier() and kind not in PLAIN else []
            yield Field(item.target.id, default, meaning, tuple(below), allowed(file, kind))


def default_text(file: Path, node: ast.expr) -> str:
    """A default value in the spelling of the command line; a factory is named by what it makes."""
    try:
        if isinstance(node, ast.Name):
            return spelt(constant(file, node.id))
        return spelt(ast.literal_eval(node))
    except ValueError:
        return "{}" if "default_factory=dict" in ast.unparse(node) else ast.unparse(node)


def constant(file: Path, name: str) -> Any:
    """The value of a constant that a source file defines or imports. Only files that import nothing
    are run for it; raises `ValueError` if its value cannot be read in another way."""
    body = ast.parse(file.read_text(encoding="utf-8")).body if file.is_file() else []
    imports = [item for item in body if isinstance(item, ast.ImportFrom)]
    for source in imports:
        for alias in source.names:
            if (alias.asname or alias.name) == name:
                return constant(source_of(str(source.module)), alias.name)
    for item in body:
        assigned = item.targets[0] if isinstance(item, ast.Assign) else None
        assigned = item.target if isinstance(item, ast.AnnAssign) else assigned
        if assigned is None or ast.unparse(assigned) != name:
            continue
        assert isinstance(item, (ast.Assign, ast.AnnAssign)) and item.value is not None
        if isinstance(item.value, ast.Call) and ast.unparse(item.value.func) == "get_args":
            return listed(file, item.value.args[0])
        plain = not any(isinstance(other, ast.Import) for other in body)
        if plain and all(source.module == "__future__" for source in imports):
            return runpy.run_path(str(file))[name]
        return ast.literal_eval(item.value)
    raise ValueError(name)
