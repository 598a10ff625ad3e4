"""Adaptive against fixed lengths: thresholds are chosen on other prompts than they are reported on, and every text is the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from heads.api.checkpoint import new_drafter, save_drafter
from heads.api.registry import get_kind
from inference.target.loading import TargetConfig
from inference.target.model import TargetModel
from scripts.adaptive_lengths import chosen, main

TINY = Path(__file__).parents[2] / "assets" / "tiny-target"


def test_each_family_keeps_its_best_threshold() -> None:
    goodput = {"fixed 1": 1.0, "fixed 2": 1.2, "head 0.1": 1.4, "head 0.3": 1.3, "scheduler alone": 0.9}
    assert chosen(goodput) == {"fixed": "fixed 2", "head": "head 0.1", "scheduler": "scheduler alone"}


def test_a_report_names_what_was_chosen_and_reports_it_on_other_prompts(tmp_path: Path) -> None:
    target = TargetModel.load(TargetConfig(path=str(TINY), dtype="float32", device="cpu"))
    config = get_kind("early_exit").config_class(exit_layer=6)
    drafter = new_drafter("early_exit", config, target.info, target.weights, 0)
    save_drafter(drafter, tmp_path / "drafter", target.info)
    out = tmp_path / "report.json"
    assert main([str(tmp_path / "drafter"), "--out", str(out), "--per-domain", "1", "--tokens", "8"]) == 0
    report = json.loads(out.read_text())
    assert report["different_texts"] == 1
    assert set(report["chosen"]) == {"fixed", "entropy", "confidence", "scheduler", "between"}
    assert set(report["chosen"].values()) <= set(report["arms"])
    assert {"fixed 1", "fixed 8"} <= set(report["arms"])
    assert set(report["arms"]) < set(report["goodput_where_chosen"])
    committed = {numbers["committed"] for numbers in report["arms"].values()}
    assert len(committed) == 1, "the same text is as many tokens for every arm"


def test_a_missing_drafter_is_an_error_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path / "none"), "--out", str(tmp_path / "report.json")]) == 2
    assert "none" in capsys.readouterr().err and not (tmp_path / "report.json").exists()
