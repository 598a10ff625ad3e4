"""`headstart generate`: which inputs and settings its answers are complete for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts.cli import main
from scripts.run.folder import read_record
from tests.inference.tokenizers import save_micro_target

PROMPTS = [f"Write a function that adds {n} and {n * n}." for n in range(3)]


def write_rows(path: str, prompts: list[str]) -> None:
    rows = [{"id": f"{path}{n}", "prompt": text} for n, text in enumerate(prompts)]
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def command(in_folder: Path) -> list[str]:
    """A generation whose answers are complete."""
    save_micro_target(Path("target"))
    write_rows("train.jsonl", PROMPTS)
    write_rows("valid.jsonl", ["Say something else."])
    given = "target=local target.path=target target.device=cpu run.threads=1 data=jsonl".split()
    given += "data.path=train.jsonl data.held_out=[valid.jsonl] sampling.max_new_tokens=8".split()
    given += "data.reserve.validation=0 data.reserve.bench=0".split()
    assert main(["generate", *given]) == 0
    assert main(["generate", *given, "--complete"]) == 0
    return ["generate", *given]


@pytest.mark.parametrize("changed", ["held out", "template"])
def test_answers_are_not_complete_for_changed_inputs(
    command: list[str], capsys: pytest.CaptureFixture[str], changed: str
) -> None:
    if changed == "held out":
        write_rows("valid.jsonl", PROMPTS[:1])
    else:
        file = Path("target/chat_template.jinja")
        file.write_text(file.read_text().replace("<|assistant|>", "<|system|>"))
    assert main([*command, "--complete"]) == 3
    assert main(command) == 2
    words = {"held out": "data.left_out was", "template": "target.chat_template was"}
    assert words[changed] in capsys.readouterr().err
    # what an earlier version recorded
    out = Path("outputs/default/generate")
    record = read_record(out)
    assert record is not None
    record.inputs = {name: record.inputs[name] for name in ("train.jsonl",)}
    record.all_inputs = False
    record.write(out)
    assert main([*command, "--complete"]) == 0


def test_answers_are_complete_only_for_their_settings(command: list[str]) -> None:
    assert main([*command, "--complete", "sampling.temperature=0.5"]) == 3
    assert main([*command, "--complete", "run.overwrite=true"]) == 0
