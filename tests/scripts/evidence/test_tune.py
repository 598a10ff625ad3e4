"""The report on the tuner: what it compares, and the page it is written into."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from heads.api.errors import UserError
from scripts.evidence.common import read_json
from scripts.evidence.tune import PAGE, SECTION, judge, tables

CHOSEN = {
    "batch_size": 4,
    "label": "chain 2",
    "predicted_tokens_per_second": 110.0,
    "tokens_per_second": 100.0,
}
PREDICTED = [
    {"label": "none", "speedup": 1.0},
    {"label": "chain 2", "speedup": 1.5},
    {"label": "chain 3", "speedup": 1.0},
]
MEASURED = [
    {"draft": "none", "speedup": 1.0},
    {"draft": "chain 2", "speedup": 1.2},
    {"draft": "chain 3", "speedup": 1.25},
]
TUNED = {**CHOSEN, "speedup": 1.2, "predictions": PREDICTED, "measured": MEASURED}
GRID = [
    {"draft": "chain 3", "tokens_per_second": 125.0, "of_best": 1.0, "of_best_ci95": [1.0, 1.0]},
    {"draft": "chain 2", "tokens_per_second": 120.0, "of_best": 0.96, "of_best_ci95": [0.95, 0.99]},
]


def report() -> dict[str, Any]:
    error = {"tokens_per_second": 0.01, "latency_p50": -0.02, "latency_p95": 0.03}
    rows = [judge(CHOSEN, GRID) | {"tuned": TUNED, "exhaustive": []}]
    found = {"mine": {"rows": rows, "traffic": {"ways": [{"draft": "none", "error": error}]}}}
    device = {"name": "a machine", "threads": 1}
    return {
        "drafters": found,
        "device": device,
        "command": "python -m scripts.evidence.tune mine=x",
    }


def test_loss_is_against_the_best_and_the_prediction_against_its_own_measurement() -> None:
    row = judge(CHOSEN, GRID)
    assert row["best"] == "chain 3" and row["chosen"] == "chain 2"
    assert row["loss"] == pytest.approx(0.04) and row["loss_ci95"] == pytest.approx([0.01, 0.05])
    assert row["prediction_error"] == pytest.approx(0.1)
    assert row["prediction_error_on_other_prompts"] == pytest.approx(110 / 120 - 1)


def test_the_page_gets_the_tables_between_its_marks(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{SECTION.begin}\nold\n{SECTION.end}\nafter\n")
    for _ in range(2):
        SECTION.write(page, tables(report()))
        text = page.read_text()
        assert (
            text.startswith("before\n")
            and text.endswith(f"{SECTION.end}\nafter\n")
            and "old" not in text
        )
        line = (
            "| mine | 4 | chain 2 | chain 3 | 4.0% [1.0%, 5.0%] | 110 | 100 | +10.0% | -8.3% "
            "| 1.50 | 1.20 | +25.0% |"
        )
        assert text.count(line) == 1
        assert "| mine | none | +1.0% | -2.0% | +3.0% |" in text
        assert (
            "Of all 2 drafts that were checked the speedup was predicted within -20.0% to +25.0%"
            in text
        )
    page.write_text("no marks")
    with pytest.raises(UserError, match="once each"):
        SECTION.write(page, tables(report()))


def test_the_page_has_the_tables_of_the_report() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert SECTION.put(text, tables(read_json(PAGE.parent / "reports" / "tune.json"))) == text
