"""The results of a sweep's jobs: a record per job, and the table that ranks them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from heads.api.reading import read_as
from inference.manifest import MANIFEST_FILE, write_json
from inference.report.model import REPORT_FILE, read_report
from inference.terminal import make_table
from scripts.config.schema import Settings
from scripts.config.stages import Stage
from scripts.run.folder import stage_folder
from scripts.run.process import console, say, shown
from train.manifest import read_training

JOB_FILE = "job.json"


@dataclass(frozen=True)
class Reached:
    """A result of a job. path: its folder; tau and speedup with their 95% intervals."""

    path: str = ""
    name: str = ""
    """The drafter's name."""
    tau: float | None = None
    tau_ci95: tuple[float, float] | None = None
    speedup: float | None = None
    speedup_ci95: tuple[float, float] | None = None


@dataclass
class JobRecord:
    """job.json: one job of a sweep."""

    number: int
    stage: str
    overrides: list[str]
    """As for a separate command."""
    swept: dict[str, str] = field(default_factory=dict)
    """Key -> this job's value, for the keys that the sweep varies."""
    status: int = 0
    """Exit status."""
    error: str = ""
    interrupted: bool = False
    """Whether a signal ended it before it was complete; the jobs after it have not begun."""
    value: float | None = None
    """The value that a sweeper maximises: tau of a training, speedup of a measurement."""
    reached: Reached = field(default_factory=Reached)

    def write(self, folder: Path) -> None:
        write_json(folder / JOB_FILE, asdict(self))


def read_records(folder: Path) -> list[JobRecord]:
    """The records of the jobs below a sweep's folder, in order."""
    found = [read_as(JobRecord, path, "Run the sweep again.") for path in folder.rglob(JOB_FILE)]
    return sorted(found, key=lambda record: record.number)


def result_of(settings: Settings) -> tuple[float | None, Reached]:
    """The value that a finished stage reached, and its place. train: the best tau; measure: the
    best drafter's speedup; loop: the best tau of the drafters that it trains itself, since other
    jobs may train theirs in the same run. Other stages have none."""
    stage, run = settings.stage.name, settings.run.directory
    if stage == "train" and (stage_folder(settings) / MANIFEST_FILE).is_file():
        folder = stage_folder(settings)
        reached = read_training(folder)["best"]
        tau, interval = reached["tau"], reached["tau_ci95"]
        return tau, Reached(shown(folder), folder.name, tau, pair(interval) if interval else None)
    file = (
        run / {"measure": settings.measure.name, "loop": "measure"}[stage] / REPORT_FILE
        if (stage in ("measure", "loop"))
        else None
    )
    if file is None or not file.is_file():
        return None, Reached()
    entries = read_report(file).drafters
    if stage == "loop":
        own = trained_names(settings)
        entries = [item for item in entries if item.path and item.name in own]
    if not entries:  # as of a server, which has no drafters of ours
        return None, Reached(shown(file.parent))
    value = "speedup" if stage == "measure" else "tau"
    best = max(entries, key=lambda item: getattr(item, value) or 0.0)
    tau_ci95, speedup_ci95 = pair(best.tau_ci95), pair(best.speedup_ci95)
    facts = (best.tau, tau_ci95, best.speedup, speedup_ci95)
    return getattr(best, value), Reached(shown(file.parent), best.name, *facts)


def trained_names(settings: Settings) -> set[str]:
    """The names with which a measurement has the drafters that a loop trains."""
    loop = settings.loop
    recipes = loop.recipes or (() if loop.rows else (None,))
    trained = (settings.derive("train", recipe) for recipe in recipes)
    return {*loop.rows, *(stage_folder(one).name for one in trained)}


def pair(bounds: Sequence[float]) -> tuple[float, float]:
    """An interval as it is stored."""
    low, high = bounds
    return low, high


def print_ranking(stage: Stage, records: Sequence[JobRecord]) -> None:
    """Print a line per job, the best first, and the place of the best one."""
    ranked = sorted(records, key=lambda record: (-(record.value or 0.0), record.number))
    measured = any(record.reached.speedup is not None for record in records)
    valued = any(record.value is not None for record in records)
    by = {"measure": "speedup", "train": "tau", "loop": "tau"}.get(stage.name)
    title = f"{len(records)} jobs of {stage.name}" + (f", by {by}" if valued else "")
    table = make_table(title)
    keys = list(dict.fromkeys(key for record in records for key in record.swept))
    for name in ["job", *keys]:
        table.add_column(name, overflow="fold")
    numbers = ["drafter", "tau", "speedup"] if measured else ["tau"] if valued else []
    for name in numbers:
        table.add_column(name, justify="left" if name == "drafter" else "right", no_wrap=True)
    table.add_column("state", no_wrap=True)
    for record in ranked:
        reached = record.reached
        cells = {
            "drafter": reached.name,
            "tau": interval(reached.tau, reached.tau_ci95),
            "speedup": interval(reached.speedup, reached.speedup_ci95),
        }
        state = "done" if not record.status else f"failed ({record.status})"
        if record.interrupted:
            state = "interrupted"
        values = (record.swept.get(key, "") for key in keys)
        table.add_row(str(record.number), *values, *(cells[name] for name in numbers), state)
    console().print(table)
    if valued:
        say(f"best: job {ranked[0].number}; {ranked[0].reached.path}")


def interval(value: float | None, bounds: tuple[float, float] | None) -> str:
    """A number with its 95% interval; a dash where there is none."""
    if value is None:
        return "-"
    return f"{value:.2f}" + (f" [{bounds[0]:.2f}, {bounds[1]:.2f}]" if bounds else "")
