"""Measured windows on disk, so that a measurement goes on where it ended when it was interrupted or
when its server stayed away.

The answers behind which further turns are asked are kept too: other answers would be other prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from inference.engines.client import Answer
from inference.engines.counters import Acceptance, Look
from inference.line_file import LineFile, parse_lines
from inference.measure.prompts import Prompt
from inference.measure.serving.windows import Group, Side, Window

PARTIAL_FILE = "windows.partial.jsonl"
FINAL_FILE = "windows.jsonl"
Place = tuple[str, int, int, int, int, int]
"""Domain, range of prompt tokens, concurrency, repeat and number of a window."""


@dataclass(frozen=True)
class Part:
    """A window at one server, and what was known of the server after it."""

    answers: list[Answer]
    seconds: float
    counted: Acceptance | None
    repeated: int
    restarts: int
    look: Look | None


@dataclass(frozen=True)
class WindowRecord:
    """A window at all servers. prompts: the ids of those that were answered."""

    place: Place
    prompts: list[str]
    parts: list[Part]


@dataclass(frozen=True)
class TurnRecord:
    """The answer behind which a conversation's next turn is asked."""

    prompt: str
    answer: str


@dataclass
class WindowLog:
    """The records of a running measurement. windows, turns: of an earlier command; turns: answers
    by prompt."""

    file: LineFile
    windows: dict[Place, WindowRecord]
    turns: dict[str, str]

    @classmethod
    def open(cls, directory: Path, fingerprint: str, sides: Sequence[Side]) -> WindowLog:
        """Continue an unfinished measurement with the same fingerprint, or begin a new one."""
        file = LineFile(directory / PARTIAL_FILE)
        lines = file.read(fingerprint)
        windows = [line for line in lines if "place" in line]
        turns = [line for line in lines if "place" not in line]
        records = parse_lines(WindowRecord, windows, file.path)
        answers = parse_lines(TurnRecord, turns, file.path)
        file.begin(fingerprint, lines)
        for record in records[-1:]:
            for side, part in zip(sides, record.parts, strict=True):
                side.resume(part.repeated, part.restarts, part.look)
        return cls(
            file,
            {record.place: record for record in records},
            {turn.prompt: turn.answer for turn in answers},
        )

    def add_turn(self, prompt: str, answer: str) -> None:
        """Keep the answer to a turn."""
        self.file.add(asdict(TurnRecord(prompt, answer)))

    def add_window(self, place: Place, prompts: Sequence[str], sides: Sequence[Side]) -> None:
        """Keep the window that all servers have just answered."""
        parts = [
            Part(
                *(side.windows[-1].answers, side.windows[-1].seconds, side.windows[-1].counted),
                *(side.repeated, side.restarts, side.last),
            )
            for side in sides
        ]
        self.file.add(asdict(WindowRecord(place, list(prompts), parts)))

    def restore(
        self, place: Place, group: Group, prompts: Sequence[Prompt], sides: Sequence[Side]
    ) -> WindowRecord | None:
        """Give the servers a window of these prompts that was measured before, if there is one."""
        record = self.windows.get(place)
        if record is None or not set(record.prompts) <= {prompt.id for prompt in prompts}:
            return None
        _, _, _, concurrency, repeat, number = place
        units = {prompt.id: prompt.unit for prompt in prompts}
        asked = [units[name] for name in record.prompts]
        for side, part in zip(sides, record.parts, strict=True):
            measured = (part.answers, part.seconds, part.counted)
            side.windows.append(Window(group, concurrency, repeat, number, asked, *measured))
        return record
