"""A file of finished work that grows by one JSON line at a time, from which an interrupted command
continues.

The first line is a fingerprint of everything that the others depend on.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from heads.api.errors import UserError
from heads.api.reading import parse_json, read_bytes, require_object
from inference.manifest import write_bytes

Line = TypeVar("Line")


@dataclass(frozen=True)
class LineFile:
    """A file of unfinished work. path: its name until the work is finished."""

    path: Path

    def read(self, fingerprint: str) -> list[dict[str, Any]]:
        """The lines of unfinished work with this fingerprint; empty if there is none."""
        header, *lines = whole_lines(self.path) or [{}]
        return lines if header.get("fingerprint") == fingerprint else []

    def begin(self, fingerprint: str, lines: Sequence[Mapping[str, Any]]) -> None:
        """Write the file anew, with the lines that are kept."""
        every = [{"fingerprint": fingerprint}, *lines]
        write_bytes(self.path, "".join(json.dumps(one) + "\n" for one in every).encode())

    def add(self, line: Mapping[str, Any]) -> None:
        """Append a line."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def finish(self, name: str) -> None:
        """Give the file its final name, so that the next command begins a new one."""
        os.replace(self.path, self.path.with_name(name))

    def remove(self) -> None:
        """Delete the file, if its lines went into another one."""
        self.path.unlink(missing_ok=True)


def whole_lines(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a file, which may be missing; a last line that was cut off by a kill is
    dropped."""
    if not path.is_file():
        return []
    lines = []
    for text in read_bytes(path).splitlines():
        try:
            lines.append(require_object(parse_json(text, f"'{path}'"), f"'{path}'"))
        except UserError:
            break
    return lines


def parse_lines(kind: type[Line], lines: Sequence[dict[str, Any]], path: Path) -> list[Line]:
    """A file's lines as objects of a dataclass; raises `UserError` for other lines."""
    try:
        return TypeAdapter(list[kind]).validate_python(lines)  # type: ignore[valid-type]
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise UserError(
            f"'{path}' is damaged: a line does not have the form of the others ({place}: "
            f"{first['msg']}). Delete the file, and repeat the command that writes it."
        ) from error
