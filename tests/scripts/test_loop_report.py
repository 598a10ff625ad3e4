"""The report of rounds: its page says what its JSON holds, and a row's gains are those of the numbers beside them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from scripts.loop_report_page import markdown

REPORTS = Path(__file__).resolve().parents[2] / "docs" / "reports"


@pytest.fixture(scope="module")
def content() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((REPORTS / "loop.json").read_text(encoding="utf-8"))
    return found


def test_the_page_is_written_from_the_json(content: dict[str, Any]) -> None:
    assert (REPORTS / "loop.md").read_text(encoding="utf-8") == markdown(content)


def test_gains_follow_from_the_rows(content: dict[str, Any]) -> None:
    """In the committed report: accepted drafted tokens per pass are tau - 1, and a row's gain is over its own open loop."""
    kinds = [*content["kinds"].values(), *content.get("few_prompts", {}).get("kinds", {}).values()]
    assert kinds
    for entry in kinds:
        opened = entry["rows"]["open"]["tau"] - 1
        for row in entry["rows"].values():
            assert row["over_open"]["accepted"] == pytest.approx((row["tau"] - 1) / opened - 1, abs=1e-9)
            assert row["lossless"]["mismatches"] == 0
            assert row["tokens"] <= 1.005 * entry["rows"]["open"]["tokens"]  # equal training, or less
        for row in entry.get("ablation", {}).values():
            plain = entry["ablation"]["plain"]["tau"] - 1
            assert row["over_plain"]["accepted"] == pytest.approx((row["tau"] - 1) / plain - 1, abs=1e-9)
