"""Plain values (what YAML holds) to frozen dataclasses, by the type hints of the fields.

Every refusal names the dotted path, what was given and what is allowed. Lists become the tuples that frozen dataclasses declare,
which is why this is not left to OmegaConf's structured nodes (see docs/decisions.md).
"""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from heads.api.errors import UserError, suggest

T = TypeVar("T")

UNSET = "???"
"""Hydra's mark for a value that the user must give."""

WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    Path: "a path",
    types.NoneType: "null",
}


def to_dataclass(cls: type[T], values: Any, path: str) -> T:
    """Build `cls` from a mapping; raises `UserError` for unknown keys, wrong types, missing values and refusals of `cls` itself."""
    if not isinstance(values, Mapping):
        raise UserError(f"{path}: expected keys of {cls.__name__}, given {describe(values)}.")
    hints = get_type_hints(cls)
    known = {item.name: item for item in fields(cls)}  # type: ignore[arg-type]
    for name in values:
        if name not in known:
            raise UserError(f"{path}.{name}: there is no such key.{suggest(str(name), known)}")
    built = {name: convert(value, hints[name], f"{path}.{name}") for name, value in values.items()}
    for name, item in known.items():
        if name not in built and item.default is MISSING and item.default_factory is MISSING:
            raise UserError(f"{path}.{name} is missing and has no default. Give it as {path}.{name}=...")
    try:
        return cls(**built)
    except UserError as error:
        message = str(error)
        raise UserError(message if message.startswith(f"{path}.") else f"{path}: {message}") from error


def convert(value: Any, hint: Any, path: str) -> Any:
    """`value` as the type `hint`; raises `UserError` naming `path` when it does not fit."""
    if isinstance(value, str) and value == UNSET:
        raise UserError(f"{path} is missing. Give it as {path}=... ({expected(hint)}).")
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if is_dataclass(hint) and isinstance(hint, type):
        return to_dataclass(hint, value, path)
    if origin in (Union, types.UnionType):
        return convert_union(value, arguments, hint, path)
    if origin is Literal:
        if value in arguments and type(value) in {type(option) for option in arguments}:
            return value
        raise UserError(f"{path}: given {describe(value)}.{suggest(str(value), map(str, arguments))}")
    if origin in (tuple, list):
        return convert_sequence(value, origin, arguments, hint, path)
    if origin is dict or origin is Mapping:
        return convert_mapping(value, arguments, hint, path)
    return convert_scalar(value, hint, path)


def convert_union(value: Any, options: tuple[Any, ...], hint: Any, path: str) -> Any:
    """The first option of a union that takes the value, exact types first (so that `int | str` keeps 3 a number)."""
    if value is None and types.NoneType in options:
        return None
    options = tuple(option for option in options if option is not types.NoneType)
    if len(options) == 1:
        return convert(value, options[0], path)
    for option in sorted(options, key=lambda option: type(value) is not option):
        try:
            return convert(value, option, path)
        except UserError:
            continue
    raise refusal(value, hint, path)


def convert_sequence(value: Any, origin: type, arguments: tuple[Any, ...], hint: Any, path: str) -> Any:
    """A list from YAML as tuple or list, every entry converted."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise refusal(value, hint, path)
    if origin is tuple and Ellipsis not in arguments:
        if len(value) != len(arguments):
            raise refusal(value, hint, path)
        return tuple(
            convert(v, a, f"{path}[{i}]") for i, (v, a) in enumerate(zip(value, arguments, strict=True))
        )
    return origin(convert(item, arguments[0], f"{path}[{i}]") for i, item in enumerate(value))


def convert_mapping(value: Any, arguments: tuple[Any, ...], hint: Any, path: str) -> dict[Any, Any]:
    """A mapping from YAML as dict, every value converted."""
    if not isinstance(value, Mapping):
        raise refusal(value, hint, path)
    return {convert(k, arguments[0], path): convert(v, arguments[1], f"{path}.{k}") for k, v in value.items()}


def convert_scalar(value: Any, hint: Any, path: str) -> Any:
    """Numbers, text, switches and paths. A whole number is a fine float and a fine text; nothing else is converted silently."""
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is str and isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if hint is Path and isinstance(value, str):
        return Path(value)
    if isinstance(hint, type) and isinstance(value, hint) and not (hint is int and isinstance(value, bool)):
        return value
    raise refusal(value, hint, path)


def refusal(value: Any, hint: Any, path: str) -> UserError:
    """The error for a value of the wrong type."""
    return UserError(f"{path}: expected {expected(hint)}, given {describe(value)}.")


def expected(hint: Any) -> str:
    """A type hint in words, for error messages and help."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(expected(option) for option in arguments)
    if origin is Literal:
        return "one of " + ", ".join(map(str, arguments))
    if origin in (tuple, list):
        return f"a list [..] of {expected(arguments[0])}"
    if origin is dict or origin is Mapping:
        return f"keys with {expected(arguments[1])} each"
    return WORDS.get(hint, getattr(hint, "__name__", str(hint)))


def describe(value: Any) -> str:
    """A given value in words: the value and its type."""
    if value is None:
        return "null"
    name = {
        bool: "a switch",
        int: "a whole number",
        float: "a number",
        str: "text",
        list: "a list",
        dict: "keys",
    }
    return f"{value!r} ({name.get(type(value), type(value).__name__)})"
