"""Runs the demo several times: `python -m scripts.evidence.demo_repeats` writes demo.json,
demo_sampled.json and demo_repeats.json in docs/reports.

Every run is `headstart loop experiment=demo` in a separate folder and a separate process, on a
machine that does nothing else. demo.json and demo_sampled.json are the reports of the run whose
fastest trained drafter has the median speedup; demo_repeats.json has every run's figures, their
medians and the worst of them. A run that is complete is not repeated.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from heads.api.errors import UserError
from inference.manifest import write_json
from inference.report.model import REPORT_FILE, Report, read_report
from scripts.evidence.common import Facts
from scripts.tools.common import REPORTS, ROOT, command

MEASUREMENTS = {"measure": "demo", "sampled": "demo_sampled"}
"""Folder of a run -> name of the committed report."""
SECONDS_FILE = "seconds.json"


def repeat(given: argparse.Namespace) -> None:
    """Run, compare and write; raises `UserError` if a run fails."""
    names = [f"demo-{number}" for number in range(1, given.runs + 1)]
    root = ROOT / given.root
    seconds = {name: run_demo(given.root, name) for name in names}
    found = {
        measured: {name: read_report(root / name / measured / REPORT_FILE) for name in names}
        for measured in MEASUREMENTS
    }
    chosen = middle(found["measure"])
    for measured, committed in MEASUREMENTS.items():
        source = root / chosen / measured / REPORT_FILE
        shutil.copyfile(source, REPORTS / f"{committed}.json")
    content = {
        "command": given.command,
        "seconds": seconds,
        "median_seconds": statistics.median(seconds.values()),
        "committed_run": chosen,
        **{name: summary(reports) for name, reports in found.items()},
    }
    write_json(REPORTS / "demo_repeats.json", content)
    for measured, reports in found.items():
        for line in lines(measured, summary(reports)):
            print(line)


def run_demo(root: Path, name: str) -> float:
    """Run one demo unless that was done; returns its seconds. root: relative to the repository, so
    that reports name the same folder for any place of the repository."""
    folder = ROOT / root / name
    path = folder / SECONDS_FILE
    if not path.is_file():
        if folder.exists():
            raise UserError(
                f"{folder} was begun and not finished, so its time is not known. Remove the "
                "folder and run the same command again."
            )
        options = [f"run.root={root}", f"run.name={name}"]
        words = [sys.executable, "-m", "scripts.cli", "loop", "experiment=demo", *options]
        with tempfile.TemporaryDirectory(prefix="headstart-compiled-") as compiled:
            # every run is a first one and compiles its steps
            environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": compiled}
            begun = time.monotonic()
            done = subprocess.run(words, cwd=ROOT, env=environment, check=False)
            seconds = time.monotonic() - begun
        if done.returncode:
            raise UserError(f"{name} failed, see above. Remove {folder} and run it again.")
        write_json(path, {"seconds": round(seconds, 1)})
    return float(json.loads(path.read_text(encoding="utf-8"))["seconds"])


def middle(reports: Mapping[str, Report]) -> str:
    """The run whose fastest trained drafter has the median speedup (the lower of two)."""

    def best(name: str) -> float:
        return max(item.speedup for item in reports[name].drafters if item.trained)

    return sorted(reports, key=best)[(len(reports) - 1) // 2]


def summary(reports: Mapping[str, Report]) -> Facts:
    """Per drafter: speedup, interval and tau of every run, the median and the worst."""
    first = next(iter(reports.values()))
    return {item.name: drafter_facts(item.name, list(reports.values())) for item in first.drafters}


def drafter_facts(name: str, reports: Sequence[Report]) -> Facts:
    """One drafter over all runs."""
    found = [next(item for item in report.drafters if item.name == name) for report in reports]
    speedups = [item.speedup for item in found]
    return {
        "speedup": speedups,
        "speedup_ci95": [[*item.speedup_ci95] for item in found],
        "tau": [item.tau for item in found],
        "median_speedup": statistics.median(speedups),
        "worst_speedup": min(speedups),
        "worst_ci95_low": min(item.speedup_ci95[0] for item in found),
        "identical": [item.lossless.identical for item in found],
        "sequences": [item.lossless.sequences for item in found],
        "disturbed": [bool(report.repeats and report.repeats.disturbed) for report in reports],
    }


def lines(measured: str, facts: Facts) -> list[str]:
    """The summary of a measurement for the console."""
    return [
        f"{measured} {name}: median {item['median_speedup']:.2f}, worst "
        f"{item['worst_speedup']:.2f} (interval from {item['worst_ci95_low']:.2f}), tau "
        f"{statistics.median(item['tau']):.2f}"
        for name, item in facts.items()
    ]


main = command(
    repeat,
    runs=(3, "how often"),
    root=(Path("outputs/demo_repeats"), "folder of the runs, from the repository"),
)

if __name__ == "__main__":
    sys.exit(main())
