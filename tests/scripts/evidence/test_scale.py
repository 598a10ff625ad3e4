"""The scripts behind docs/scale.md and docs/reports/throughput.json: figures from lines, tables
from the report."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest

from heads.api.errors import UserError
from scripts.config.flags import read_flags
from scripts.config.schema import load_settings
from scripts.config.stages import STAGES
from scripts.evidence import scale, throughput
from scripts.evidence.common import family_recipes, read_json
from train.tracking.clock import PARTS


def line(step: int, tokens: int, seconds: float, mfu: float, **parts: float) -> dict[str, Any]:
    cost = {**dict.fromkeys(PARTS, 0.0), **parts, "mfu": mfu, "peak_memory": 5}
    return {"step": step, "loss": 1.0, "tokens": tokens, "seconds": seconds, "cost": cost}


def test_figures_are_ratios_of_sums_behind_the_warm_up() -> None:
    lines = [
        line(1, 100, 9.0, 0.01, drafter=9.0),
        line(2, 200, 9.0, 0.01, drafter=9.0),
        line(3, 300, 1.0, 0.5, drafter=0.75, target=0.25),
        line(4, 500, 3.0, 0.1, drafter=2.0, data=1.0),
    ]
    summary = dict.fromkeys(("kind", "peak", "peak_memory_bytes", "padding", "device", "engine"), 7)
    found = throughput.steady(lines, summary)
    assert found["tokens_per_second"] == 300 / 4
    assert found["step_seconds"] == 2.0
    assert found["shares"]["drafter"] == 2.75 / 4
    assert found["loader_wait_seconds"] == 1.0
    assert found["mfu"] == pytest.approx((0.5 * 1 + 0.1 * 3) / 4)


def test_finished_rows_stay_and_are_not_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[str] = []

    def train(name: str, overrides: object, given: object) -> dict[str, Any]:
        measured.append(name)
        if len(measured) == 2:
            raise KeyboardInterrupt
        return {"peak_memory_bytes": 1, "tokens_per_second": float(len(measured)), "mfu": 0.5}

    monkeypatch.setattr(throughput, "train_briefly", train)
    monkeypatch.setattr(throughput, "family_recipes", lambda: {"a": [], "b": [], "c": []})
    monkeypatch.setattr(throughput, "git_state", lambda: {"revision": "r", "diff": ""})
    words = ["--answers", str(tmp_path), "--out", str(tmp_path / "report.json")]
    with pytest.raises(KeyboardInterrupt):
        throughput.main(words)
    assert throughput.main(words) == 0
    assert measured == ["a", "b", "b", "c"]  # goes on where it was interrupted
    assert throughput.main([*words, "--only", "b", "--steps", "9"]) == 0
    rows = {row["name"]: row for row in read_json(tmp_path / "report.json")["rows"]}
    assert measured[4:] == ["b"] and [*rows] == ["a", "b", "c"]
    assert (rows["a"]["settings"]["steps"], rows["b"]["settings"]["steps"]) == (24, 9)
    assert rows["a"]["settings"]["rows"] == 2  # as the experiment
    assert throughput.main(words) == 0
    assert measured[5:] == ["b"]  # measured with other settings


def test_rows_that_continue_a_drafter_are_measured_only_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[str] = []

    def train(name: str, overrides: object, given: object) -> dict[str, Any]:
        measured.append(name)
        return {"peak_memory_bytes": 1, "tokens_per_second": 1.0, "mfu": 0.5}

    recipes = {"a": ["head=medusa"], "b": ["head=eagle3", "train.refresh.init_from=elsewhere"]}
    monkeypatch.setattr(throughput, "train_briefly", train)
    monkeypatch.setattr(throughput, "family_recipes", lambda: recipes)
    words = ["--answers", str(tmp_path), "--out", str(tmp_path / "report.json")]
    assert throughput.main(words) == 0 and measured == ["a"]
    assert throughput.main([*words, "--only", "b"]) == 0 and measured == ["a", "b"]


def test_every_row_of_the_families_is_measured_and_composes() -> None:
    rows = family_recipes()
    assert {"medusa", "eagle3", "dspark", "distilled", "peagle"} <= set(rows)
    for overrides in rows.values():
        load_settings(STAGES["train"], [throughput.EXPERIMENT, *overrides])


def test_the_plans_compose() -> None:
    flags = read_flags(["--plan", "head=eagle3"])
    assert "--plan" in flags and flags.overrides == ["head=eagle3"]
    for target, ways in scale.TARGETS.items():
        for head, changes in product(scale.HEADS, ways.values()):
            found = scale.row_settings(target, head, changes, 8)
            assert (found.plan.gpu, found.plan.count) == ("h100", 8)
            assert found.target.dtype_name == "bfloat16"


def test_the_page_has_the_tables_of_the_report() -> None:
    text = scale.PAGE.read_text(encoding="utf-8")
    assert scale.TABLES.put(text, scale.tables(read_json(scale.REPORT))) == text
    assert scale.main(["--check"]) == 0
    with pytest.raises(UserError, match="once each"):
        scale.TABLES.put(text.replace(scale.TABLES.begin, ""), "")
