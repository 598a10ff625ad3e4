"""The held-out check: its page reports what does not hold, and its rows are those of the
families."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.config.schema import load_settings
from scripts.config.stages import STAGES
from scripts.evidence import held_out


def test_the_page_says_what_does_not_hold() -> None:
    entry = {
        "tau": 1.5,
        "tau_ci95": [1.4, 1.6],
        "tar": 0.3,
        "acceptance": {"unconditional": [0.4, 0.1]},
        "parameters": 1e6,
    }
    content = {
        "command": "c",
        "target": {"parameters": 3e6},
        "rows": {"medusa": entry, "eagle": {**entry, "tau": 1.7}},
        "order": [
            {"above": "eagle", "below": "medusa", "holds": True, "difference": 0.2},
            {"above": "eagle3", "below": "eagle", "holds": False, "difference": -0.1},
        ],
    }
    page = "\n".join(held_out.markdown(content))
    assert page.index("| eagle |") < page.index("| medusa |")
    assert "| eagle above medusa | +0.20 | yes |" in page
    assert "| eagle3 above eagle | -0.10 | no |" in page


def test_rows_are_those_of_the_families() -> None:
    sweep = load_settings(STAGES["loop"], ["experiment=families"]).loop.sweep
    assert set(held_out.ROWS) <= set(sweep)
    assert {name for pair in held_out.ORDER for name in pair} <= set(held_out.ROWS)


def test_the_target_and_its_answers_can_be_made_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages: list[str] = []
    monkeypatch.setattr(held_out.held_out_target, "make", lambda work, *_: work / "target")
    monkeypatch.setattr(held_out.common, "run_on_target", lambda stage, *_: stages.append(stage))
    assert held_out.main(["--answers-only", "--work", str(tmp_path)]) == 0
    assert stages == ["generate"]
