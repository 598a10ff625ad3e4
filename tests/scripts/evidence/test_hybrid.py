"""The report about a hybrid target: its memory formula is what a cache holds, and it says what
transformers refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from scripts.assets.tiny_target import HYBRID
from scripts.assets.training import build_model
from scripts.evidence import hybrid
from scripts.tools.common import TARGET
from tests.scripts.evidence.test_families import run_folder

SMALL = {"num_hidden_layers": 4, "hidden_size": 32, "intermediate_size": 32, "head_dim": 16}


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A random hybrid in the embedded one's place."""
    torch.manual_seed(0)
    folder = tmp_path / "target"
    build_model({**HYBRID, **SMALL}).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TARGET / name, folder / name)
    monkeypatch.setattr(hybrid, "TARGET", folder)
    return folder


def test_the_report_counts_what_a_cache_holds(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page, reports = tmp_path / "page.md", tmp_path / "reports"
    page.write_text(f"{hybrid.SECTION.begin}\n{hybrid.SECTION.end}\n")
    reports.mkdir()
    monkeypatch.setattr(hybrid, "PAGE", page)
    monkeypatch.setattr(hybrid, "REPORTS", reports)
    assert hybrid.main([str(run_folder(tmp_path / "run"))]) == 0
    content = json.loads((reports / "hybrid.json").read_text())
    state = content["memory"]["state"]
    assert state["held"] == state["formula"] == 3 * 4 * (4 * 64 * 64 + 3 * 512)
    verifications = content["memory"]["verifications"]
    assert set(verifications) == set(hybrid.WIDTHS)
    for found in verifications.values():
        assert found["held"] == found["formula"] > 0
    assert verifications["chain of 4, 8 rows"]["held"] == 8 * verifications["chain of 4"]["held"]
    (good,) = (line for line in page.read_text().splitlines() if line.startswith("| good"))
    assert "256/256" in good


def test_transformers_refuses_to_draft_for_a_recurrent_state(target: Path) -> None:
    found = hybrid.transformers_loops()
    assert found["generate"] == "runs"
    assert "stateful" in found["assisted"]
    assert "stateful" in found["prompt lookup"]
