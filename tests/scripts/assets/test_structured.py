"""The structured prompts are those that the script writes, and each schema is a grammar."""

from __future__ import annotations

import json

from inference.decoding.structured.grammars import Grammars
from inference.measure.prompts import load_prompts
from scripts.assets.structured import PROMPTS, rows
from tests.inference.decoding.structured.parts import structured_target


def test_the_committed_prompts_are_written_again() -> None:
    file = PROMPTS / "structured" / "structured.jsonl"
    assert [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] == rows()
    prompts = load_prompts(file.parent)
    assert {prompt.domain for prompt in prompts} == {"structured"}
    for prompt, row in zip(prompts, rows(), strict=True):
        assert prompt.constraint is not None
        Grammars.of(structured_target()).compile(prompt.constraint)
        assert prompt.to_line()["json_schema"] == row["json_schema"]
