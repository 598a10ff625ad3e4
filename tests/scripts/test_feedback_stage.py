"""`headstart feedback` from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from inference.manifest import MANIFEST_FILE, read_manifest
from scripts.cli import main
from scripts.stages import feedback
from tests.train.feedback.recorded import decoded, target, tokens_of, write_answers, write_records
from train.feedback.branches import BRANCHES
from train.feedback.variations import VARIATIONS


def test_records_of_a_run_become_its_feedback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    completions = decoded("eagle3")
    answers = write_answers(tmp_path / "r" / "generate", completions)
    command = ["feedback", f"run.root={tmp_path}", "run.name=r", "feedback.token_weights=true"]
    assert main(command) == 2
    assert (
        "holds no records: there is no records.json. Generate with generate.drafter"
        in capsys.readouterr().err
    )
    write_records(answers / "records", completions, "eagle3")
    assert not main(command)
    said = capsys.readouterr().out
    manifest = read_manifest(tmp_path / "r" / "feedback", "generate")
    assert (
        f"{manifest['feedback']['errors']} first errors" in said
        and "code: tau" in said
        and "run.answers=" in said
    )
    assert manifest["provenance"]["command"] and manifest["round"] == 1
    assert not main(command)
    assert "is complete; nothing has changed" in capsys.readouterr().out
    assert main([*command, "feedback.replay=true"]) == 2
    assert "feedback.replay" in capsys.readouterr().err


def test_a_folder_made_before_more_was_recorded_is_not_skipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    completions, records = decoded("eagle3"), tmp_path / "records"
    write_answers(tmp_path / "r" / "generate", completions)
    write_records(records, completions[:4], "eagle3")
    command = ["feedback", f"run.root={tmp_path}", "run.name=r", f"feedback.records=[{records}]"]
    command.append("feedback.token_weights=true")
    assert not main(command)
    out = tmp_path / "r" / "feedback"
    before = read_manifest(out, "generate")["feedback"]["verifications"]
    write_records(records, completions[4:], "eagle3")
    assert main(command) == 2
    assert ".parquet has changed" in capsys.readouterr().err
    assert not main([*command, "run.overwrite=true"])
    assert read_manifest(out, "generate")["feedback"]["verifications"] > before
    # an earlier version recorded none of these files
    record = json.loads((out / "run.json").read_text())
    record["inputs"] = {k: v for k, v in record["inputs"].items() if k.endswith(".json")}
    assert record.pop("all_inputs")
    (out / "run.json").write_text(json.dumps(record))
    assert not main(command)


def test_prompts_for_the_next_generation_are_written_beside_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    completions = decoded("eagle3")
    answers = write_answers(tmp_path / "r" / "generate", completions)
    write_records(answers / "records", completions, "eagle3")
    command = [
        "feedback",
        f"run.root={tmp_path}",
        "run.name=r",
        "feedback.branches=1",
        "feedback.branch_likely=0.0001",
    ]
    two = f"feedback.records=[{answers / 'records'},{answers / 'records'}]"
    assert main([*command, two]) == 2
    assert "given: 1 folders of answers and 2 of records" in capsys.readouterr().err
    assert not main(command)
    lines = (tmp_path / "r" / "feedback" / BRANCHES).read_text(encoding="utf-8").splitlines()
    texts = [tokens_of(one) for one in completions]
    assert len(lines) == len(completions)
    for line in lines:
        tokens = json.loads(line)["tokens"]
        # an answer up to the error,
        assert any(text[: len(tokens) - 1] == tokens[:-1] for text in texts)
        # and then what no answer has
        assert not any(text[: len(tokens)] == tokens for text in texts)


def test_variations_are_written_after_everything_that_may_be_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They take longest: a command that then fails must not have to write them again. The template
    has the arguments with which the prompts were rendered."""
    completions = decoded("eagle3")
    answers = write_answers(tmp_path / "r" / "generate", completions)
    manifest = json.loads((answers / MANIFEST_FILE).read_text(encoding="utf-8"))
    manifest["data"] = {"template_arguments": {"enable_thinking": False}}
    (answers / MANIFEST_FILE).write_text(json.dumps(manifest), encoding="utf-8")
    write_records(answers / "records", completions, "eagle3")
    built = tmp_path / "r" / "feedback"
    seen = []

    def write(target: object, pairs: object, out: Path, *more: object) -> int:
        seen.append((out, (built / MANIFEST_FILE).is_file(), stage_state(built), more[-1]))
        return 0

    monkeypatch.setattr(feedback, "write_variations", write)
    monkeypatch.setattr(feedback.TargetModel, "load", lambda config: target())
    command = ["feedback", f"run.root={tmp_path}", "run.name=r", "feedback.variations=1"]
    assert not main(command)
    assert seen == [(built / VARIATIONS, True, "running", {"enable_thinking": False})]
    assert stage_state(built) == "complete"


def stage_state(folder: Path) -> str:
    state: str = json.loads((folder / "run.json").read_text(encoding="utf-8"))["state"]
    return state
