"""The load test of the server: a short run of all its phases for real, and what it does not let
pass."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from inference.decoding.requests import Request
from inference.decoding.sampling.distribution import SamplingSettings
from scripts.evidence import serve_load
from scripts.evidence.serve_load import Case, Seen

GOOD: dict[str, Any] = {
    "load": {"failed": 0, "refused": 0, "mismatches": 0},
    "overload": {"failed": 0, "refused": 9, "mismatches": 0, "refused_without_retry_after": 0},
    "memory": {"growth": 0.01},
    "end": {"status": 0, "failed": 0},
}


@pytest.mark.parametrize(
    ("part", "key", "value"),
    [
        ("load", "failed", 1),
        ("load", "refused", 1),
        ("load", "mismatches", 1),
        ("overload", "failed", 1),
        ("overload", "mismatches", 1),
        ("overload", "refused", 0),
        ("overload", "refused_without_retry_after", 1),
        ("memory", "growth", 0.05),
        ("end", "status", 1),
        ("end", "failed", 1),
    ],
)
def test_nothing_that_is_asked_for_may_fail(part: str, key: str, value: float) -> None:
    assert serve_load.is_fine(GOOD)
    planted = copy.deepcopy(GOOD)
    planted[part][key] = value
    assert not serve_load.is_fine(planted)


def test_an_answer_counts_as_identical_by_text_and_tokens() -> None:
    case = Case(Request(0, (5,), 1, 4), "code", SamplingSettings(), "ab", (7, 8))
    seen = Seen()
    for text, tokens in (("ab", (7, 8)), ("ab", (7, 9)), ("ac", (7, 8))):
        seen.note(case, text, tokens, 0.5)
    assert (seen.answers, seen.identical, seen.tokens) == (3, 1, 6)
    assert seen.different == [(case, "ab", (7, 9)), (case, "ac", (7, 8))]


def test_growth_is_judged_after_the_warm_up() -> None:
    memory = [(float(second), 100 + 10 * min(second, 30)) for second in range(100)]
    kept = serve_load.memory_growth(90, memory)
    assert [kept[key] for key in ("start", "warm", "end", "growth")] == [90, 400, 400, 0.0]


@pytest.mark.slow
def test_all_phases_run(tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    short = "--clients 4 --minutes 0.03 --overload-seconds 1 --rows 2 --cases 8".split()
    serve_load.main([*short, "--out", str(out), "--log", str(tmp_path / "log.txt")])
    report = json.loads(out.read_text())
    for phase in ("load", "overload"):
        found = report[phase]
        assert found["answers"] > 0 and found["failed"] == found["mismatches"] == 0
        assert found["identical"] + found["near_ties"] == found["answers"]
    assert report["load"]["refused"] == 0 and report["overload"]["refused"] > 0
    assert report["end"]["status"] == report["end"]["failed"] == 0
