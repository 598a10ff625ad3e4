"""The report on feature formats: changes are taken over the seeds that both ways have, and say how sure they are."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from scripts.feature_formats import table, tau_row


@pytest.fixture
def given(tmp_path: Path) -> argparse.Namespace:
    """A work folder with trainings in bf16 (three seeds) and int8 (two of them, and another one)."""
    trained = {"bf16": {0: 1.50, 1: 1.60, 2: 1.70}, "int8": {0: 1.47, 1: 1.632, 7: 9.0}, "int4": {0: 1.2}}
    for way, seeds in trained.items():
        for seed, tau in seeds.items():
            folder = tmp_path / f"eagle3-{way}-{seed}"
            folder.mkdir()
            (folder / "manifest.json").write_text(json.dumps({"best": {"tau": tau}}))
    return argparse.Namespace(work=tmp_path)


def test_a_change_is_over_the_seeds_that_both_have(given: argparse.Namespace) -> None:
    row = tau_row(given, "eagle3", "int8")
    assert row is not None and row["tau"] == {"0": 1.47, "1": 1.632, "7": 9.0}
    assert row["seeds"] == 2
    assert row["changes"] == pytest.approx([-0.02, 0.02])
    assert row["change"] == pytest.approx((1.47 + 1.632) / 3.1 - 1)
    assert row["standard_error"] == pytest.approx(0.02)  # of two values 0.04 apart: 0.04 / sqrt(2) / sqrt(2)


def test_one_seed_says_nothing_of_its_error_and_none_is_no_row(given: argparse.Namespace) -> None:
    row = tau_row(given, "eagle3", "int4")
    assert row is not None and row["standard_error"] is None
    assert tau_row(given, "eagle3", "fp8") is None
    rows = [found for way in ("bf16", "int8", "int4") if (found := tau_row(given, "eagle3", way))]
    lines = table({"formats": [], "rows": rows})
    assert [line.split(" | ")[4] for line in lines[-3:]] == ["+0.00%", "+0.06% ± 2.00%", "-20.00%"]
