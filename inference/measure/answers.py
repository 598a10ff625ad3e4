"""Measured answers on disk, one JSON line each. report.json is computed from them, and an
interrupted measurement resumes from them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass, field
from pathlib import Path

from inference.decoding.requests import PassRecord
from inference.line_file import LineFile, parse_lines, whole_lines
from inference.measure.metrics import Outcome

PARTIAL_FILE = "records.partial.jsonl"
FINAL_FILE = "records.jsonl"


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

    def outcome(self, domain: str = "", unit: str = "") -> Outcome:
        """The outcome from which tau and speed are computed."""
        passes = [PassRecord(*item) for item in self.passes]
        return Outcome(self.prompt, domain, passes, self.seconds, unit)


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
        file = LineFile(directory / PARTIAL_FILE)
        records = cls(directory, file, arms)
        done: dict[tuple[str, int], dict[str, Record]] = {}
        for record in parse_lines(Record, file.read(fingerprint), file.path):
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
        self.file.finish(FINAL_FILE)


def read_records(path: Path) -> list[Record]:
    """The records of a finished measurement."""
    return parse_lines(Record, whole_lines(path)[1:], path)
