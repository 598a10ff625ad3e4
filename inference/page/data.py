"""What the page shows, gathered: measurements with their transcripts, trainings, rounds. Nothing is computed here but a choice."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from heads.api.errors import UserError
from inference.measure.breakdown.transcripts import read_transcripts
from inference.report_schema import arm_name, read_report

Entry = Mapping[str, Any]
LOG_FILE = "log.jsonl"
ROUNDS_FILE = "loop.json"


@dataclass(frozen=True)
class Run:
    """One measurement. answers: its transcripts."""

    label: str
    report: Mapping[str, Any]
    answers: Sequence[Mapping[str, Any]] = ()

    @property
    def drafters(self) -> list[Entry]:
        """Its entries, the fastest first."""
        return sorted(self.report["drafters"], key=lambda entry: -float(entry["speedup"]))

    @property
    def best(self) -> Entry | None:
        """The fastest entry; None in a report without drafters."""
        found = self.drafters
        return found[0] if found else None

    @property
    def domains(self) -> list[str]:
        return sorted({name for entry in self.report["drafters"] for name in entry["domains"]})

    def domain_interval(self, entry: Entry, domain: str) -> tuple[float, float] | None:
        """The interval of a domain's speedup, which stands in the report's free part; None where it does not."""
        try:
            low, high = self.report["run"]["arms"][arm_name(entry)]["speedup_ci95_by_domain"][domain]
            return float(low), float(high)
        except (KeyError, TypeError, ValueError):
            return None


@dataclass(frozen=True)
class TauPoint:
    """tau at a place of a training (step) or of a loop (round)."""

    at: float
    tau: float
    low: float
    high: float
    best: bool = False


@dataclass(frozen=True)
class Training:
    """The tau of one training by step."""

    name: str
    points: list[TauPoint]


@dataclass(frozen=True)
class Page:
    """Everything that the page is made of. rounds: tau by round, of a closed loop."""

    runs: list[Run]
    trainings: list[Training] = field(default_factory=list)
    rounds: list[Training] = field(default_factory=list)


def gather(reports: Sequence[tuple[str, Path]], run_folder: Path | None = None) -> Page:
    """Read labelled report.json files (or folders that hold one) and, from a run's folder, its trainings and rounds.

    Raises `UserError` when a report or its transcripts are missing what they must have.
    """
    if not reports:
        raise UserError("no report was given. Name at least one report.json, or a folder that holds one.")
    runs = []
    for label, path in reports:
        folder = path if path.is_dir() else path.parent
        runs.append(Run(label, read_report(path), read_transcripts(folder)))
    if run_folder is None:
        return Page(runs)
    return Page(runs, read_trainings(run_folder / "train"), read_rounds(run_folder))


def read_trainings(folder: Path) -> list[Training]:
    """The measured taus of every training below `folder` that has a log; lines that a kill cut short are left out."""
    found = []
    for path in sorted(folder.glob(f"*/{LOG_FILE}")):
        points = []
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            if '"tau"' not in line:
                continue
            point = _point(_parsed(line), "step")
            if point is not None:
                points.append(point)
        if points:
            best = max(range(len(points)), key=lambda i: points[i].tau)
            last = points[best]
            points[best] = TauPoint(last.at, last.tau, last.low, last.high, best=True)
            found.append(Training(path.parent.name, points))
    return found


def read_rounds(folder: Path) -> list[Training]:
    """tau by round from a loop's summary (`loop.json`): one line, of the drafter that the rounds trained. Empty without one."""
    path = folder / ROUNDS_FILE
    if not path.is_file():
        return []
    content = _parsed(path.read_text(encoding="utf-8", errors="replace"))
    rows = content.get("rounds") if isinstance(content, dict) else None
    points = []
    best = content.get("best") if isinstance(content, dict) else None
    kept = best.get("round") if isinstance(best, dict) else None
    for place, row in enumerate(rows if isinstance(rows, list) else []):
        found = row.get("measured", row) if isinstance(row, dict) else row
        about = {"round": place, "best": place == kept}
        point = _point({**found, **about} if isinstance(found, dict) else found, "round")
        if point is not None:
            points.append(point)
    name = content.get("kind", "rounds") if isinstance(content, dict) else "rounds"
    return [Training(str(name), points)] if points else []


def _parsed(written: str) -> Any:
    try:
        return json.loads(written)
    except ValueError:
        return None


def _point(row: Any, key: str) -> TauPoint | None:
    """A line of a log as a point; None where it is something else."""
    try:
        tau = float(row["tau"])
        low, high = (float(value) for value in row.get("tau_ci95") or (tau, tau))
        return TauPoint(float(row[key]), tau, low, high, bool(row.get("best", False)))
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
