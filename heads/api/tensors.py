"""Readers of external safetensors files, with limits as in `heads.api.reading`.

The library checks a header against the file: its length, that every tensor lies inside, and that
its bytes match its shape and format. So the shapes that `tensor_shapes` returns are no larger than
the file, and comparing with them needs no memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from heads.api.errors import UserError
from heads.api.reading import refusing
from heads.api.system_errors import system_error

ADVICE = "The file is missing or was cut off; copy or train it again."
BROKEN = (
    *(SafetensorError, OSError, ValueError, TypeError, LookupError, RuntimeError, OverflowError),
    AttributeError,
)
"""Errors that the library and torch raise for a file that is damaged or of another format."""


def read_tensors(path: Path, advice: str = ADVICE) -> dict[str, Tensor]:
    """All tensors of a file; raises `UserError`."""
    with refusing(f"'{path}'", advice, *BROKEN):
        tensors: dict[str, Tensor] = load_file(str(path))
    return tensors


@contextmanager
def open_tensors(path: Path, advice: str = ADVICE) -> Iterator[Any]:
    """Yield a file whose tensors are read one by one (`safetensors.safe_open`, for torch). Errors
    of opening and reading it leave the block as `UserError`."""
    with refusing(f"'{path}'", advice, *BROKEN), safe_open(str(path), "pt") as file:
        yield file


def write_tensors(
    tensors: dict[str, Tensor], path: Path, metadata: dict[str, str] | None = None
) -> None:
    """Write a file. An error of the system, which the library only spells in words, is raised as
    `OSError` with the file's name."""
    try:
        save_file(tensors, str(path), metadata)
    except (OSError, SafetensorError) as error:
        number = system_error(error)
        if number is None:
            raise
        raise OSError(number, os.strerror(number), str(path)) from error


def tensor_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Name -> shape of a file's tensors, without reading them; raises `UserError`."""
    with open_tensors(path) as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


def require_shapes(
    found: dict[str, tuple[int, ...]], expected: dict[str, tuple[int, ...]], path: Path, what: str
) -> None:
    """Raise `UserError` unless a file's tensors are those of `what`, by name and shape."""
    missing, unknown = sorted(set(expected) - set(found)), sorted(set(found) - set(expected))
    if missing or unknown:
        raise UserError(
            f"'{path}' does not fit {what}: missing tensors {_some(missing)}, unknown tensors "
            f"{_some(unknown)}."
        )
    for name, shape in found.items():
        if shape != expected[name]:
            raise UserError(
                f"'{path}': tensor '{name}' has shape {list(shape)}, expected "
                f"{list(expected[name])}."
            )


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return f"{names[:8]}{more}"
