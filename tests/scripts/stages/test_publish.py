"""The stages that exchange drafters: which reports are pushed, and which folders a live check
takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.cli import main
from scripts.stages.publish.push import without_lossy
from tests.inference.export.hub.example_folder import write_measured

LOSSY = {"rule": "typical", "temperature": 1.0}


def test_a_lossy_measurement_does_not_keep_a_drafter_from_being_pushed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exact = write_measured(tmp_path / "exact", "0" * 64)
    lossy = write_measured(tmp_path / "lossy", "0" * 64, settings=LOSSY)
    assert without_lossy([exact]) == [exact]
    assert without_lossy([lossy]) == [lossy], "the push refuses it"
    assert capsys.readouterr().out == ""
    assert without_lossy([lossy, exact]) == [exact]
    said = capsys.readouterr().out
    assert f"Left out: {lossy}" in said and "push.allow_mismatches=true" in said


def test_a_live_check_of_another_engines_folder_names_the_engine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such a folder may have no config.json, which the prompts of a check are looked up by."""
    (tmp_path / "headstart_export.json").write_text('{"engine": "llama.cpp"}')
    arguments = [f"verify.dir={tmp_path}", "verify.mode=live", f"run.root={tmp_path / 'outputs'}"]
    assert main(["verify-export", "target=embedded", *arguments]) == 2
    assert "is for llama.cpp; a live check serves with vLLM" in capsys.readouterr().err
