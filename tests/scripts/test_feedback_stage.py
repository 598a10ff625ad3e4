"""`headstart feedback` from the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from inference.manifest import read_manifest
from scripts.cli import main
from tests.train.feedback.recorded import decoded, write_answers, write_records


def test_records_of_a_run_become_its_feedback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    completions = decoded("eagle3")
    answers = write_answers(tmp_path / "r" / "generate", completions)
    command = ["feedback", f"run.root={tmp_path}", "run.name=r", "feedback.token_weights=true"]
    assert main(command) == 2
    assert "holds no records: there is no records.json. Generate with generate.drafter" in capsys.readouterr().err
    write_records(answers / "records", completions, "eagle3")
    assert not main(command)
    said = capsys.readouterr().out
    manifest = read_manifest(tmp_path / "r" / "feedback", "generate")
    assert f"{manifest['feedback']['errors']} first errors" in said and "code: tau" in said and "run.answers=" in said
    assert manifest["provenance"]["command"] and manifest["round"] == 1
    assert not main(command)
    assert "is complete; nothing to do" in capsys.readouterr().out
    assert main([*command, "feedback.replay=true"]) == 2
    assert "feedback.replay" in capsys.readouterr().err
