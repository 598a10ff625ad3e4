"""Measured answers on disk, one JSON line each (`LineFile`). report.json is computed from them, and
an interrupted measurement resumes from them."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from heads.api.errors import UserError
from heads.api.reading import parse_json, read_bytes, require_object
from inference.decoding.requests import PassRecord
from inference.manifest import write_bytes
from inference.measure.metrics import Outcome

PARTIAL_FILE = "records.partial.jsonl"
FINAL_FILE = "records.jsonl"
Line = TypeVar("Line")


@dataclass(frozen=True)
class LineFile:
    """A file that grows by a JSON line at a time. The first line is a fingerprint of everything
    that the others depend on. While something is measured, it has the name `partial`."""

    partial: Path
    final: Path

    def read(self, fingerprint: str) -> list[dict[str, Any]]:
        """The lines of an unfinished measurement with this fingerprint."""
        header, *lines = _read(self.partial) or [{}]
        return lines if header.get("fingerprint") == fingerprint else []

    def begin(self, fingerprint: str, lines: Sequence[dict[str, Any]]) -> None:
        """Write the file anew, with the lines that are kept."""
        every = [{"fingerprint": fingerprint}, *lines]
        write_bytes(self.partial, "".join(json.dumps(one) + "\n" for one in every).encode())

    def add(self, line: dict[str, Any]) -> None:
        """Append a line."""
        with self.partial.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def finish(self) -> None:
        """Give the file its final name, so that the next measurement begins a new one."""
        os.replace(self.partial, self.final)


@dataclass(frozen=True)
class Record:
    """One answer of one arm. passes: (accepted, committed, rejected); seconds: per phase; ahead:
    (drafts, those of them made ahead and kept, hidden seconds), with `decode.ahead`."""

    arm: str
    prompt: str
    repeat: int
    tokens: list[int]
    passes: list[tuple[int, int, bool]]
    seconds: dict[str, float]
    ahead: tuple[int, int, float] | None = None

    def outcome(self, domain: str = "") -> Outcome:
        """The outcome from which tau and speed are computed."""
        passes = [PassRecord(*item) for item in self.passes]
        return Outcome(self.prompt, domain, passes, self.seconds)


@dataclass
class AnswerLog:
    """The records of a running measurement. A prompt is done when every arm has answered it."""

    directory: Path
    file: LineFile
    arms: list[str]
    done: dict[tuple[str, int], dict[str, Record]] = field(default_factory=dict)

    @classmethod
    def open(cls, directory: Path, fingerprint: str, arms: list[str]) -> AnswerLog:
        """Continue an unfinished measurement with the same fingerprint, or begin a new one."""
        file = LineFile(directory / PARTIAL_FILE, directory / FINAL_FILE)
        records = cls(directory, file, arms)
        done: dict[tuple[str, int], dict[str, Record]] = {}
        for record in parse_lines(Record, file.read(fingerprint), file.partial):
            done.setdefault((record.prompt, record.repeat), {})[record.arm] = record
        # The arms of one prompt are compared with one another. If a prompt was interrupted, all its
        # arms are measured again.
        records.done = {key: found for key, found in done.items() if set(found) == set(arms)}
        kept = [asdict(record) for found in records.done.values() for record in found.values()]
        file.begin(fingerprint, kept)
        return records

    def __len__(self) -> int:
        return sum(len(found) for found in self.done.values())

    def has(self, prompt: str, repeat: int) -> bool:
        """Whether every arm has answered the prompt in this repeat."""
        return len(self.done.get((prompt, repeat), {})) == len(self.arms)

    def add(self, record: Record) -> None:
        """Keep a record and append it to the file."""
        self.done.setdefault((record.prompt, record.repeat), {})[record.arm] = record
        self.file.add(asdict(record))

    def of(self, arm: str, repeats: Collection[int] | None = None) -> list[Record]:
        """An arm's records by repeat, then in the order in which prompts were first answered.
        repeats: None means all."""
        found = [each[arm] for each in self.done.values()]
        wanted = [one for one in found if repeats is None or one.repeat in repeats]
        return sorted(wanted, key=lambda item: item.repeat)

    def decode_seconds(self, arm: str, repeats: Collection[int]) -> dict[int, float]:
        """Repeat -> seconds of an arm's answers, prefill excluded."""
        spent = dict.fromkeys(repeats, 0.0)
        for record in self.of(arm, repeats):
            phases = record.seconds.items()
            spent[record.repeat] += sum(value for phase, value in phases if phase != "prefill")
        return spent

    def finish(self) -> None:
        """Give the records their final name, so that the next measurement begins a new file."""
        self.file.finish()


def read_records(path: Path) -> list[Record]:
    """The records of a finished measurement."""
    return parse_lines(Record, _read(path)[1:], path)


def parse_lines(kind: type[Line], lines: Sequence[dict[str, Any]], path: Path) -> list[Line]:
    """A file's lines as objects of a dataclass; raises `UserError` for other lines."""
    try:
        return TypeAdapter(list[kind]).validate_python(lines)  # type: ignore[valid-type]
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise UserError(
            f"'{path}' holds no records of a measurement ({place}: {first['msg']}). Measure again."
        ) from error


def _read(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a records file; a last line cut off by a kill is dropped."""
    if not path.is_file():
        return []
    lines = []
    for text in read_bytes(path).splitlines():
        try:
            lines.append(require_object(parse_json(text, f"'{path}'"), f"'{path}'"))
        except UserError:
            break
    return lines
