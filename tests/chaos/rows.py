"""What an attack is reported as: rows with how many were tried and how many failed, and the file
that holds those of all parts."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from heads.api.reading import read_object
from inference.manifest import write_json

FORMAT = 1
MOST_WORDS = 20
"""Failures that a row describes."""


@dataclass
class Row:
    """One area of a part: how many were tried, how many failed, the first failures in words, and
    what else was measured."""

    part: str
    area: str
    tried: int = 0
    failed: int = 0
    words: list[str] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)

    def note(self, wrong: str, tried: int = 1) -> None:
        """Count `tried` of them; wrong: what was, empty where nothing was, and counted as one
        where nothing was tried."""
        tried = max(tried, int(bool(wrong)))
        self.tried += tried
        if wrong:
            self.failed += tried
            self.words = [*self.words, wrong][:MOST_WORDS]


class Areas(dict[str, Row]):
    """The rows of a part by area, made when they are first asked for."""

    def __init__(self, part: str) -> None:
        super().__init__()
        self.part = part

    def __missing__(self, area: str) -> Row:
        self[area] = Row(self.part, area)
        return self[area]


def content(row: Row, seed: int, command: str) -> dict[str, Any]:
    """A row as the file holds it."""
    return {**asdict(row), "seed": seed, "command": command}


def merged(
    before: Sequence[dict[str, Any]], rows: Sequence[dict[str, Any]], whole: Collection[str]
) -> list[dict[str, Any]]:
    """Earlier rows with newer ones in place of theirs, sorted by part. whole: parts that were run
    as a whole, of which no earlier row stays."""
    kept = {(row["part"], row["area"]): row for row in before if row["part"] not in whole}
    kept |= {(row["part"], row["area"]): row for row in rows}
    return sorted(kept.values(), key=lambda row: str(row["part"]))


def save(path: Path, rows: Sequence[dict[str, Any]], whole: Collection[str]) -> None:
    """Put rows into the file at `path`, which keeps those of other parts."""
    before = read_object(path)["rows"] if path.is_file() else []
    write_json(path, {"format": FORMAT, "rows": merged(before, rows, whole)})


def show(rows: Sequence[Row]) -> None:
    """Tried and failed, the figures, and the first failures in words."""
    table = Table("part", "area", "tried", "failed", "")
    for row in rows:
        figures = ", ".join(f"{name} {value:.3g}" for name, value in row.figures.items())
        table.add_row(row.part, row.area, str(row.tried), str(row.failed), figures)
    console = Console()
    console.print(table)
    for row in rows:
        for words in row.words:
            console.print(f"{row.part}, {row.area}: {words}", markup=False, highlight=False)
    tried, failed = sum(row.tried for row in rows), sum(row.failed for row in rows)
    console.print(f"tried {tried}, failed {failed}")
