"""Readers of external files: text, JSON, JSON lines and YAML, with or without a byte order mark.

Each reader limits the size of a file, the depth of its values and (for YAML, whose aliases
multiply) their number. Whatever is wrong with a file (missing, a folder, not allowed, no UTF-8, cut
off, numbers that are too large), the result is one `UserError` that names the file and says what to
do. `heads.api.tensors` does the same for safetensors.
"""

from __future__ import annotations

import hashlib
import json
import re
from codecs import BOM_UTF8
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

import yaml
from pydantic import TypeAdapter, ValidationError

from heads.api.config import build, shown
from heads.api.errors import UserError

T = TypeVar("T")

ADVICE = "Copy it again, or remove it and run the stage that wrote it again."
UTF_8 = "utf-8-sig"
"""UTF-8 whose byte order mark, which editors and spreadsheets on Windows write, is left out."""
MIB = 1024 * 1024
LARGEST_JSON = 1024 * MIB
LARGEST_YAML = 4 * MIB
LARGEST_LINE = 256 * MIB
DEEPEST = 100
"""Levels of nested lists and mappings that a file may hold; files of Headstart have about ten."""
MOST_VALUES = 1_000_000
"""Values of a YAML file, including those that its aliases repeat."""
_ESCAPED_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_BROKEN_JSON = (ValueError, RecursionError)  # ValueError: also for UTF-8 and for long numbers
# PyYAML's constructors pass on Python's own errors for an empty or invalid tagged value.
_BROKEN_YAML = (
    *(yaml.YAMLError, ValueError, TypeError, LookupError, AttributeError, RecursionError),
    ArithmeticError,
)


def reason(error: BaseException) -> str:
    """An error's message on one line; for errors of the operating system, without the number."""
    said = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    lines = said.strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__


@contextmanager
def refusing(name: str, advice: str, *errors: type[BaseException]) -> Iterator[None]:
    """Turn `errors` of the block into a `UserError`: `name` cannot be read, the reason,
    `advice`."""
    try:
        yield
    except UserError:
        raise
    except errors as error:
        raise UserError(f"{name} cannot be read: {reason(error)}. {advice}") from error


def read_bytes(path: Path, advice: str = ADVICE, most: int = LARGEST_JSON) -> bytes:
    """The content of a file of at most `most` bytes; raises `UserError`."""
    # ValueError: for a path with a NUL
    with refusing(f"'{path}'", advice, OSError, ValueError), path.open("rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise UserError(f"'{path}' cannot be read: it is larger than {most:,} bytes. {advice}")
    return content


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's content, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_text(path: Path, advice: str = ADVICE, most: int = LARGEST_JSON) -> str:
    """The text of a UTF-8 file; raises `UserError`."""
    content = read_bytes(path, advice, most)
    try:
        return content.decode(UTF_8).replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        raise UserError(
            f"'{path}' is not text in UTF-8 (byte {error.start} is {content[error.start]:#04x}). "
            f"{advice}"
        ) from error


def parse_json(text: str | bytes, name: str, advice: str = ADVICE) -> Any:
    """The values of a JSON text; raises `UserError`, which calls the text `name`."""
    try:
        written = text.decode(UTF_8) if isinstance(text, bytes) else text
        values = json.loads(written)
        _require_shallow(values)
        if _ESCAPED_SURROGATE.search(written):
            json.dumps(values, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(f"{name} holds half a character (a lone surrogate). {advice}") from error
    except _BROKEN_JSON as error:
        raise UserError(f"{name} is not readable as JSON ({reason(error)}). {advice}") from error
    return values


def read_json(path: Path, advice: str = ADVICE, most: int = LARGEST_JSON) -> Any:
    """The values of a JSON file; raises `UserError`."""
    return parse_json(read_bytes(path, advice, most), f"'{path}'", advice)


def read_object(path: Path, advice: str = ADVICE, most: int = LARGEST_JSON) -> dict[str, Any]:
    """The keys of a JSON file that holds an object; raises `UserError`."""
    return require_object(read_json(path, advice, most), f"'{path}'", advice)


def read_as(cls: type[T], path: Path, advice: str = ADVICE) -> T:
    """A dataclass from a JSON file; raises `UserError`, also for keys that do not fit."""
    values = read_object(path, advice)
    try:
        return build(cls, values, path.name)
    except UserError as error:
        raise UserError(f"'{path}' does not fit: {error} {advice}") from error


def read_json_lines(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield number (from 1) and values of each line of a JSON lines file, except empty ones; raises
    `UserError`."""
    with refusing(f"'{path}'", ADVICE, OSError, ValueError), path.open("rb") as file:
        number = 0
        while line := file.readline(LARGEST_LINE):
            number += 1
            if len(line) == LARGEST_LINE:
                raise UserError(
                    f"'{path}' line {number} is longer than {LARGEST_LINE:,} bytes. {ADVICE}"
                )
            if line.strip().removeprefix(BOM_UTF8):
                yield number, parse_json(line, f"'{path}' line {number}")


def read_yaml(path: Path, advice: str = ADVICE) -> Any:
    """The values of a YAML file, plain types only; raises `UserError`."""
    text = read_text(path, advice, LARGEST_YAML)
    try:
        values = yaml.safe_load(text)
        _require_shallow(values, MOST_VALUES)
    except _BROKEN_YAML as error:
        said = " ".join(str(error).split())[:200]
        raise UserError(
            f"'{path}' is broken: no YAML of plain values ({said}). {advice}"
        ) from error
    return values


def read_yaml_object(path: Path, advice: str = ADVICE) -> dict[str, Any]:
    """The keys of a YAML file that holds a mapping; raises `UserError`."""
    return require_object(read_yaml(path, advice), f"'{path}'", advice)


def require_object(values: Any, name: str, advice: str = ADVICE) -> dict[str, Any]:
    """Return `values` if they are a mapping whose keys are all text; raises `UserError`
    otherwise."""
    if not isinstance(values, Mapping) or not all(isinstance(key, str) for key in values):
        raise UserError(f"{name} is broken: it holds {shown(values)} in place of keys. {advice}")
    return dict(values)


def require_fit(kind: type[T], values: Any, name: str, advice: str = ADVICE) -> T:
    """Return `values` if they are of `kind`, a `TypedDict` of typing_extensions; further keys, of
    other versions, are allowed. Raises `UserError`, which names the first key that is missing or
    does not fit.
    """
    try:
        _adapter(cast(Any, kind)).validate_python(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"])) or "the whole"
        raise UserError(f"{name} is broken: {place}: {first['msg']}. {advice}") from error
    return cast(T, values)


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _require_shallow(values: Any, most: float = float("inf")) -> None:
    """Raise `RecursionError` for values nested more than `DEEPEST` deep, `ValueError` for more than
    `most` values."""
    level, count = [values], 0
    for _ in range(DEEPEST):
        inner: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                inner += value.values()
            elif isinstance(value, list):
                inner += value
            if len(inner) > most:
                raise ValueError(f"more than {most:,} values")
        count += len(inner)
        level = [value for value in inner if isinstance(value, (dict, list))]
        if not level:
            break
    if level and inner:
        raise RecursionError(f"more than {DEEPEST} lists or mappings inside each other")
    if count > most:
        raise ValueError(f"more than {most:,} values")
