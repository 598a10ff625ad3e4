"""Reads the content of the page: measurements with their transcripts, trainings, rounds of a
loop."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from heads.api.errors import UserError
from heads.api.reading import parse_json
from inference.decoding.rules.names import TEXT
from inference.measure.breakdown.transcripts import Transcript, read_transcripts
from inference.report import claims
from inference.report.markdown import NO_REPORT
from inference.report.model import DrafterResult, Report, read_report

LOG_FILE = "log.jsonl"
ROUNDS_FILE = "loop.json"


@dataclass(frozen=True)
class Run:
    """One measurement."""

    label: str
    report: Report
    answers: Sequence[Transcript] = ()

    @property
    def title(self) -> str:
        """What distinguishes the measurement, and its name."""
        return claims.title(self.label, self.report)

    @property
    def drafters(self) -> list[DrafterResult]:
        """The drafters: trained ones first, then those without weights, each group by descending
        speed."""
        return self.report.ranked

    @property
    def best(self) -> DrafterResult | None:
        """The drafter of the headline: the fastest trained one, or the fastest if none is trained;
        None in a report without drafters."""
        return next(iter(self.drafters), None)

    @property
    def lossless_words(self) -> str:
        """Whether the drafters changed the text, as a sentence."""
        settings = self.report.settings
        if settings.promise != TEXT:
            return f"Drafts are accepted by rule {settings.rule_text}."
        if wrong := [drafter.name for drafter in self.drafters if drafter.lossless.mismatches]:
            names = ", ".join(wrong)
            return f"Answers differ from plain decoding for {names}: see the last column."
        return "No answer differs from plain decoding beyond the number format's own ties."


@dataclass(frozen=True)
class TauPoint:
    """tau with its 95% interval at a step of a training or in a round of a loop."""

    at: float
    tau: float
    low: float
    high: float
    best: bool = False


@dataclass(frozen=True)
class Course:
    """tau over one training, or over the rounds of one loop."""

    name: str
    points: list[TauPoint]


@dataclass(frozen=True)
class Page:
    """The content of the page."""

    runs: list[Run]
    trainings: list[Course] = field(default_factory=list)
    rounds: list[Course] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        """All drafters, by the first measurement that has them."""
        return list(dict.fromkeys(one.name for run in self.runs for one in run.drafters))

    @property
    def contexts(self) -> bool:
        """Whether a measurement has prompts in several bins of contexts."""
        return any(run.report.contexts for run in self.runs)

    @property
    def ranked_trainings(self) -> list[Course]:
        """The trainings, ordered by their best tau."""
        return sorted(self.trainings, key=lambda one: -max(point.tau for point in one.points))


def gather(reports: Sequence[tuple[str, Path]], run_folder: Path | None = None) -> Page:
    """Read labelled reports and, from a run's folder, its trainings and rounds.

    Raises `UserError` if there is no report, or if a report or its transcripts are broken.
    """
    if not reports:
        raise UserError(NO_REPORT)
    runs = []
    for label, path in reports:
        folder = path if path.is_dir() else path.parent
        runs.append(Run(label, read_report(path), read_transcripts(folder)))
    if run_folder is None:
        return Page(runs)
    return Page(runs, read_trainings(run_folder / "train"), read_rounds(run_folder))


def read_trainings(folder: Path) -> list[Course]:
    """The taus of every training below `folder`. Truncated lines are skipped."""
    found = []
    for path in sorted(folder.glob(f"*/{LOG_FILE}")):
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        points = _points((_parse(line) for line in lines if '"tau"' in line), "step")
        if points:
            best = max(range(len(points)), key=lambda i: points[i].tau)
            points[best] = replace(points[best], best=True)
            found.append(Course(path.parent.name, points))
    return found


def read_rounds(folder: Path) -> list[Course]:
    """tau by round from a loop's summary; empty if there is none or it is damaged."""
    path = folder / ROUNDS_FILE
    content = _parse(path.read_text(encoding="utf-8", errors="replace")) if path.is_file() else None
    if not isinstance(content, dict) or not isinstance(content.get("rounds"), list):
        return []
    best = content.get("best")
    kept = best.get("round") if isinstance(best, dict) else None
    rows = []
    for place, row in enumerate(content["rounds"]):
        found = row.get("measured", row) if isinstance(row, dict) else None
        if isinstance(found, dict):
            rows.append({**found, "round": place, "best": place == kept})
    points = _points(rows, "round")
    return [Course(str(content.get("kind", "rounds")), points)] if points else []


def _parse(written: str) -> Any:
    try:
        return parse_json(written, "a line")
    except UserError:
        return None


def _points(rows: Iterable[Any], key: str) -> list[TauPoint]:
    """Lines of a log as points; other lines are left out."""
    points = []
    for row in rows:
        with suppress(KeyError, TypeError, ValueError, AttributeError):
            tau = float(row["tau"])
            low, high = map(float, row.get("tau_ci95") or (tau, tau))
            points.append(TauPoint(float(row[key]), tau, low, high, bool(row.get("best", False))))
    return points
