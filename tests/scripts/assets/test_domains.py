"""The prompts of bench=domains are those that the script writes."""

from __future__ import annotations

import json

from inference.measure.prompts import load_prompts
from scripts.assets.domains import COUNT, PROMPTS, domains


def test_the_committed_prompts_are_written_again() -> None:
    for domain, rows in domains().items():
        file = PROMPTS / "domains" / f"{domain}.jsonl"
        assert [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] == rows
        assert len(rows) == COUNT
    prompts = load_prompts(PROMPTS / "domains")
    assert {len(one.turns) for one in prompts if one.domain == "chat"} == {2}
    assert all(one.constraint for one in prompts if one.domain == "structured")


def test_every_conversation_is_about_one_package() -> None:
    for row in domains()["chat"]:
        assert len({source.partition("/")[0] for source in row["source"].split(", ")}) == 1
