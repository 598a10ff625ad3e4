"""The journal of a learner: its finished work, one JSON object per line, only ever appended.

A line is written with one call and is on disk (fsync) before the learner continues. So after a kill
at any moment, the journal names exactly the finished work. A line that was cut by a kill or a full
disk is not finished work: it is removed when the journal is opened, or at once. One process writes;
a second one is refused.

    {"number": 7, "time": 1764240000.0, "event": "trained", "cycle": 2, ...}
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from heads.api.errors import UserError
from heads.api.reading import parse_json, require_object
from inference.writers import only_writer

JOURNAL_FILE = "journal.jsonl"
WRITER = ".journal.writer.json"


@dataclass(frozen=True)
class Entry:
    """One line. number: from 0 on, without gaps; time: seconds since 1970; event: the finished
    step; cycle: number of its cycle, from 1 on; facts: the other keys."""

    number: int
    time: float
    event: str
    cycle: int
    facts: dict[str, Any] = field(default_factory=dict)

    def line(self) -> bytes:
        """The entry as its line."""
        own = {"number": self.number, "time": self.time, "event": self.event, "cycle": self.cycle}
        return (json.dumps({**own, **self.facts}, allow_nan=False) + "\n").encode()

    @classmethod
    def parse(cls, text: str, name: str) -> Entry:
        """Read a line; raises `UserError` for anything else."""
        rest = require_object(parse_json(text, name, ADVICE), name, ADVICE)
        try:
            head = (rest.pop("number"), rest.pop("time"), rest.pop("event"), rest.pop("cycle"))
        except KeyError as error:
            raise UserError(f"{name} lacks {error}. {ADVICE}") from error
        number, at, event, cycle = head
        return cls(int(number), float(at), str(event), int(cycle), rest)


ADVICE = "A learner's journal is not edited: give another folder as learn.folder."


class Journal:
    """The journal in a folder, open for appending. entries: all lines so far.

    Raises `UserError` for a journal that is damaged before its last line. The folder must be held
    (`writing`).
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / JOURNAL_FILE
        folder.mkdir(parents=True, exist_ok=True)
        self.entries = read_journal(folder)
        whole = sum(len(entry) for entry in _lines(self.path))
        if self.path.is_file() and self.path.stat().st_size > whole:
            os.truncate(self.path, whole)  # removes a line that a kill has cut

    def append(self, event: str, cycle: int, **facts: Any) -> Entry:
        """Write a line and return it once it is on disk. Raises `OSError` if it cannot be written;
        nothing of it is then left."""
        entry = Entry(len(self.entries), time.time(), event, cycle, facts)
        with self.path.open("ab", buffering=0) as file:
            begin = file.tell()
            try:
                line = entry.line()
                if file.write(line) != len(line):
                    raise OSError(28, "the journal's line was cut: no space left on device")
                os.fsync(file.fileno())
            except BaseException:
                os.ftruncate(file.fileno(), begin)
                raise
        self.entries.append(entry)
        return entry

    def events(self) -> list[dict[str, Any]]:
        """All lines as plain values, for display."""
        return [json.loads(entry.line()) for entry in self.entries]

    def last(self, *events: str, cycle: int | None = None) -> Entry | None:
        """The newest entry of one of the events (of any event if none is named)."""
        for entry in reversed(self.entries):
            if (not events or entry.event in events) and cycle in (None, entry.cycle):
                return entry
        return None


@contextmanager
def writing(folder: Path) -> Iterator[Journal]:
    """The journal of a folder, for this process alone; raises `UserError` while another learner
    writes it."""
    with only_writer(folder, WRITER):
        yield Journal(folder)


def read_journal(folder: Path) -> list[Entry]:
    """All whole lines of a folder's journal; empty if there is none. Raises `UserError` for other
    content."""
    path = folder / JOURNAL_FILE
    found = []
    for number, line in enumerate(_lines(path)):
        name = f"'{path}' line {number + 1}"
        entry = Entry.parse(line.decode("utf-8", "replace"), name)
        if entry.number != number:
            raise UserError(f"{name} has number {entry.number}, not {number}. {ADVICE}")
        found.append(entry)
    return found


def _lines(path: Path) -> list[bytes]:
    """The whole lines of a file; none if the file does not exist."""
    content = path.read_bytes() if path.is_file() else b""
    return content[: content.rfind(b"\n") + 1].splitlines(keepends=True)
