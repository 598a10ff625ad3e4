"""The report of exact decoding on two short answers of the embedded target."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts.evidence import exact


@pytest.mark.slow
def test_the_report_has_both_ways_of_every_arm(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "exact"
    given = ["--dtypes", "float32", "--prompts", "2", "--tokens", "8", "--out", str(out)]
    assert exact.main(given) == 0
    found = json.loads(out.with_suffix(".json").read_text())
    assert [row["nodes"] for row in found["rows"]] == [1, 1, 6, 6, 26]
    for row in found["rows"]:
        assert row["exact"]["differing"] == 0
        assert row["time"] == row["exact"]["seconds"] / row["usual"]["seconds"]
        if row["nodes"] > 1:
            assert row["exact"]["flips_per_1000"] == 0 and row["exact"]["tokens"] == 16
    page = out.with_suffix(".md").read_text()
    assert page.count("| float32 |") == 5
    assert exact.main(["--dtypes", "float31", "--out", str(out)]) == 2
    assert "'float31' is none of" in capsys.readouterr().err
