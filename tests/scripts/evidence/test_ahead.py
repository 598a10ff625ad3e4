"""The report of drafting ahead on two short answers of the embedded target."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts.evidence import ahead


@pytest.mark.slow
def test_the_report_has_every_way_of_every_drafter(tmp_path: Path) -> None:
    out = tmp_path / "ahead"
    given = ["--prompts", "2", "--tokens", "8", "--depth", "2", "--repeats", "1", "--serial", "1"]
    assert ahead.main([*given, "--out", str(out)]) == 0
    rows = json.loads(out.with_suffix(".json").read_text())["rows"]
    ways = [(row["drafter"], row["way"]) for row in rows]
    own = ("serial 1", "ahead")
    drafters = [(name, way) for name in ("ngram", "small model") for way in own]
    assert ways == [("", "plain 1"), *drafters]
    for row in rows:
        assert row["texts"] == row["answers"] == 2
        if row["drafter"]:
            assert row["drafts"] == 2 and row["over"]["serial 1"]["ratio"] > 0
        if row["way"] == "ahead":
            assert 0 <= row["kept_ahead"] <= 1 and row["hidden_ms"] >= 0
    page = out.with_suffix(".md").read_text()
    assert page.count("| small model |") == 2
