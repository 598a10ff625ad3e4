"""Bad values for every setting, made from the configuration's classes.

Of every setting of every stage: another type, a number beyond its bounds, NaN and infinity, whole
numbers that nothing holds, names that lead out of a folder, values inside each other. A value is
refused when the command ends with status 2 and one message that names the setting; any other end,
and a value that is taken, is a failure.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import math
import random
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from heads.api.config import bare
from heads.api.errors import UserError
from heads.api.kinds import kind_names
from heads.api.registry import get_kind
from scripts.cli import main
from scripts.config.schema import build_group, group_classes, load_settings
from scripts.config.stages import STAGES
from tests.chaos.rows import Row

NAN, INFINITY = math.nan, math.inf
NUMBERS = (NAN, INFINITY, -INFINITY, 10**30, -(10**30), 10**400)
NAMES = ("../x", "..", ".", "a/b", "/etc", "a\\b", "a\nb", "a\x1bb")
"""What is no name of a folder."""
FOLDERS = ("run.name", "run.drafter", "measure.name", "audit.name", "watch.name")
"""Settings that name a folder."""
UNWRITABLE = ("a\0b", "\ud800")
"""Texts that no command line and no file holds; other programs can still give them."""
DEEPEST = 3000


@dataclass(frozen=True)
class BadInput:
    """A value that `stage` must refuse for a setting. place: keys below `group`, and places in
    lists; value: of the whole setting `keys` that holds the place."""

    stage: str
    group: str
    keys: tuple[str, ...]
    value: Any

    @property
    def setting(self) -> str:
        return ".".join((self.group, *self.keys))

    @property
    def named(self) -> str:
        """What a message must name: the last key."""
        return self.keys[-1]

    @property
    def spellable(self) -> bool:
        """Whether a command line can give the value."""
        return not any(text in UNWRITABLE for text in texts(self.value))

    @property
    def override(self) -> str:
        return f"{self.setting}={spell(self.value)}"


def every_input() -> Iterator[BadInput]:
    """All bad inputs, of every group once, for the first stage that reads it."""
    seen: set[str] = set()
    for stage in STAGES.values():
        for group in stage.groups:
            if group not in seen and group != "head":
                seen.add(group)
                for keys, value in of_class(group_classes()[group], ()):
                    yield BadInput(stage.name, group, keys, value)
    for setting in FOLDERS:
        group, key = setting.split(".")
        stage_name = next(one.name for one in STAGES.values() if group in one.groups)
        for name in NAMES:
            yield BadInput(stage_name, group, (key,), name)


def every_head_input() -> Iterator[tuple[str, BadInput]]:
    """(kind, bad input) of the configuration of every kind of drafter."""
    for kind in kind_names():
        for keys, value in of_class(get_kind(kind).config_class, ()):
            yield kind, BadInput("train", "head", keys, value)


def of_class(cls: Any, above: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """(keys, bad value) of every field of a configuration class."""
    hints = get_type_hints(cls, include_extras=True)
    for field in dataclasses.fields(cls):
        keys = (*above, field.name)
        hint = hints[field.name]
        for value in bad_values(hint):
            yield keys, value
        if dataclasses.is_dataclass(bare(hint)):
            yield from of_class(bare(hint), keys)


def bad_values(hint: Any) -> list[Any]:
    """Values that do not fit a type hint."""
    inner, marks = bare(hint), marks_of(hint)
    origin, arguments = get_origin(inner), get_args(inner)
    optional = type(None) in get_args(hint)
    none = [] if optional or inner in (Any, object) else [None]
    if inner is bool:
        return [*none, "perhaps", 2, [True], {"a": 1}, NAN]
    if inner is int:
        return [*none, "much", 1.5, True, [1], {"a": 1}, *NUMBERS, *beyond(marks)]
    if inner is float:
        return [
            *none,
            "much",
            True,
            [1.0],
            {"a": 1},
            NAN,
            INFINITY,
            -INFINITY,
            1e308,
            -1e308,
            1e13,
            10**400,
            *beyond(marks),
        ]
    if inner is str:
        return [*none, 1.5, True, ["a"], {"a": 1}, NAN, *UNWRITABLE]
    if inner is Path:
        return [*none, 1.5, ["a"], {"a": 1}, *UNWRITABLE]
    if origin is Literal:
        return [*none, "zzz", 10**30, NAN, ["a"], {"a": 1}]
    if origin in (tuple, list):
        items = [[value] for value in bad_values(arguments[0]) if value is not None]
        return [*none, 5, "text", {"a": 1}, nested(), *items]
    if origin in (dict, Mapping) or inner in (dict, Mapping):
        items = [{"a": value} for value in (bad_values(arguments[1]) if arguments else [])]
        return [*none, 5, "text", [1], *items]
    if dataclasses.is_dataclass(inner):
        wrong = [{keys[0]: value} for keys, value in of_class(inner, ()) if len(keys) == 1]
        return [*none, 5, "text", [1], {"zzz": 1}, *wrong]
    if origin in (Union, types.UnionType):
        other = [] if bool in arguments else [True]
        return [{"zzz": 1}] if takes_number(arguments) else [5.5, {"zzz": 1}, *other]
    return []


def unlimited(hint: Any, marks: tuple[Any, ...] = ()) -> list[Any]:
    """The numbers within a type hint that have no limits of their own, on both sides."""
    if hint in (int, float):
        low = any(hasattr(mark, name) for mark in marks for name in ("ge", "gt"))
        high = any(hasattr(mark, name) for mark in marks for name in ("le", "lt"))
        return [] if low and high else [hint]
    if get_origin(hint) is Literal:
        return []
    if get_origin(hint) is Annotated:
        inner, *more = get_args(hint)
        return unlimited(inner, (*marks, *more))
    shared = marks if get_origin(hint) in (Union, types.UnionType) else ()
    return [found for inner in get_args(hint) for found in unlimited(inner, shared)]


def unlimited_of(cls: Any, above: str) -> Iterator[str]:
    """The settings of a configuration class, those within it included, with such numbers."""
    hints = get_type_hints(cls, include_extras=True)
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        if unlimited(hint):
            yield f"{above}.{field.name}"
        for inner in classes_in(hint):
            yield from unlimited_of(inner, f"{above}.{field.name}")


def classes_in(hint: Any) -> Iterator[Any]:
    """The configuration classes within a type hint."""
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        yield hint
    for inner in get_args(hint):
        yield from classes_in(inner)


def takes_number(options: tuple[Any, ...]) -> bool:
    """Whether a number, or a number as text, fits one of some types."""
    return any(bare(option) in (int, float, Any) for option in options)


def marks_of(hint: Any) -> tuple[Any, ...]:
    """The marks of a type hint with limits, also beside `None`."""
    if get_origin(hint) is Annotated:
        return get_args(hint)[1:]
    found = [marks_of(option) for option in get_args(hint) if get_origin(option) is Annotated]
    return found[0] if found and get_origin(hint) in (Union, types.UnionType) else ()


def beyond(marks: tuple[Any, ...]) -> list[float]:
    """The nearest numbers outside of limits."""
    found = []
    for mark in marks:
        for name, step in (("ge", -1), ("gt", 0), ("le", 1), ("lt", 0)):
            if hasattr(mark, name):
                found.append(getattr(mark, name) + step)
    return found


@cache
def nested() -> Any:
    """Lists inside each other, deeper than anything that is read."""
    value: Any = []
    for _ in range(DEEPEST):
        value = [value]
    return value


def texts(value: Any) -> Iterator[str]:
    """All texts in a value that is not nested deeply."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from texts(item)
    elif isinstance(value, (list, tuple)) and value is not nested():
        for item in value:
            yield from texts(item)


def spell(value: Any) -> str:
    """A value as Hydra reads it on the command line."""
    if value is nested():
        return "[" * DEEPEST + "]" * DEEPEST
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str):
        quoted = value.replace("\\", "\\\\").replace("'", "\\'")
        return f"'{quoted}'"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}: {spell(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(spell, value)) + "]"
    return str(value)


def put(values: Mapping[str, Any], keys: tuple[str, ...], value: Any) -> dict[str, Any]:
    """A copy of a group's plain values with one setting replaced."""
    first, *rest = keys
    inner = value if not rest else put(values.get(first) or {}, tuple(rest), value)
    return {**values, first: inner}


def failure_of_group(case: BadInput, values: Mapping[str, Any]) -> str:
    """What is wrong with how a group takes a bad value, in words; empty where it is refused."""
    try:
        build_group(case.group, put(values, case.keys, case.value))
    except UserError as error:
        return named_in(str(error), case)
    except Exception as error:  # noqa: BLE001 - that it is none of these is what is tested
        return f"{type(error).__name__}: {str(error)[:200]}"
    return "it was taken"


def failure_of_command(case: BadInput) -> str:
    """The same of a whole command, which shows the settings where it takes them."""
    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = main([case.stage, case.override, "--show"])
    except Exception as error:  # noqa: BLE001 - as above
        return f"{type(error).__name__}: {str(error)[:200]}"
    said = err.getvalue()
    if status != 2 or not said.startswith("headstart: ") or "Traceback" in said:
        return f"status {status}: {said[:300]}"
    return named_in(said, case)


def named_in(said: str, case: BadInput) -> str:
    """What is wrong with a message, in words; empty where it names the setting (of values that are
    nested too deeply: the group)."""
    fine = case.named in said or ("nested too deeply" in said and case.group in said)
    return "" if fine else f"the message does not name it: {said[:300]}"


def base_values(case: BadInput) -> Mapping[str, Any]:
    """The plain values of the group under the stage's defaults."""
    return defaults(case.stage).get(case.group) or {}


@cache
def defaults(stage: str) -> Mapping[str, Any]:
    return load_settings(STAGES[stage], []).resolved


def attack(seed: int, count: int) -> Row:
    """Give `count` bad inputs, drawn by `seed`, to commands."""
    cases = [case for case in every_input() if case.spellable]
    row = Row("inputs", "settings of all stages")
    for case in random.Random(seed).sample(cases, min(count, len(cases))):
        words = failure_of_command(case)
        row.note(f"{case.stage} {case.override[:120]}: {words}" if words else "")
    return row
