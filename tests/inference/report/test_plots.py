"""Names of drafters, domains and measurements are drawn as they are, whatever they contain."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
import pytest

from inference.report.model import parse_report
from inference.report.plots import plot_all
from tests.inference.example_report import example_report

FORMULA = "$_{$"
"""No formula that matplotlib can read."""


@pytest.mark.parametrize("place", ["drafter", "domain", "label"])
def test_dollar_signs_in_names_are_no_formula(tmp_path: Path, place: str) -> None:
    content = example_report({})
    (entry,) = content["drafters"]
    if place == "drafter":
        content = example_report({"draft": {"name": FORMULA}})
    elif place == "domain":
        content = example_report({"domains": {FORMULA: entry["domains"]["code"]}})
    label = FORMULA if place == "label" else "greedy"
    paths = plot_all({label: parse_report(content)}, tmp_path)
    assert paths and all(path.is_file() for path in paths)
    assert mpl.rcParams["text.parse_math"], "other plots of the process are not changed"
