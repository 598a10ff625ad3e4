"""The repeated demo: which run is committed, what is said of all of them, and no run is counted
whose time is unknown."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from heads.api.errors import UserError
from inference.manifest import write_json
from inference.report.model import REPORT_FILE, Report
from scripts.evidence import demo_repeats
from tests.inference.example_report import example_report

UNTRAINED = {"name": "ngram", "weights_sha256": None}
SPEEDUPS = {"demo-1": 1.9, "demo-2": 1.5, "demo-3": 1.7}


def report(speedup: float) -> dict:
    """A trained drafter of this speedup beside an untrained one that is faster in every run."""
    interval = [speedup - 0.1, speedup + 0.1]
    return example_report(
        {"speedup": speedup, "speedup_ci95": interval},
        {"kind": "ngram", "path": "", "draft": UNTRAINED, "speedup": 3.0},
    )


def test_the_committed_run_has_the_median_of_the_trained_drafters() -> None:
    reports = {name: Report(**report(value)) for name, value in SPEEDUPS.items()}
    assert demo_repeats.middle(reports) == "demo-3"
    found = demo_repeats.summary(reports)["eagle3"]
    assert found["speedup"] == [1.9, 1.5, 1.7]
    assert found["median_speedup"] == 1.7 and found["worst_speedup"] == 1.5
    assert found["worst_ci95_low"] == pytest.approx(1.4)


def test_complete_runs_are_summed_up_and_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root, reports = tmp_path / "runs", tmp_path / "reports"
    reports.mkdir()
    for number, (name, value) in enumerate(SPEEDUPS.items()):
        write_json(root / name / demo_repeats.SECONDS_FILE, {"seconds": 100.0 + number})
        for measured in demo_repeats.MEASUREMENTS:
            write_json(root / name / measured / REPORT_FILE, report(value))
    monkeypatch.setattr(demo_repeats, "REPORTS", reports)
    demo_repeats.repeat(argparse.Namespace(runs=3, root=root, command="again"))
    content = json.loads((reports / "demo_repeats.json").read_text())
    assert content["median_seconds"] == 101.0 and content["committed_run"] == "demo-3"
    assert json.loads((reports / "demo.json").read_text()) == report(1.7)
    assert "measure eagle3: median 1.70, worst 1.50" in capsys.readouterr().out


def test_a_run_that_was_not_finished_is_not_counted(tmp_path: Path) -> None:
    (tmp_path / "demo-1").mkdir()
    with pytest.raises(UserError, match="begun and not finished"):
        demo_repeats.run_demo(tmp_path, "demo-1")
