"""The report on acceptance rules, on the smallest target with one draft of each shape."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from heads.api.checkpoint import new_drafter, save_drafter
from heads.api.registry import get_kind
from inference.decoding.config import DecodeConfig
from scripts.evidence import rules, small_targets
from scripts.evidence.rules import RULES, drafts
from scripts.tools.common import cpu_target
from tests.inference.tokenizers import save_micro_target


def test_every_shape_has_its_rules() -> None:
    assert {draft.shape for draft in drafts()} == set(RULES)


def test_the_report_on_the_smallest_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_micro_target(tmp_path / "target")
    target = cpu_target(path)
    config = get_kind("medusa").config_class(num_heads=2)
    drafter = new_drafter("medusa", config, target.info, target.weights, seed=1)
    save_drafter(drafter, tmp_path / "medusa", target.info)
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"id": "a", "domain": "code", "prompt": "Write a list."}]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(rules, "cpu_target", lambda: target)
    monkeypatch.setattr(rules, "PROMPTS", prompts)
    monkeypatch.setattr(rules, "TEMPERATURES", (1.0,))
    monkeypatch.setattr(rules, "SEEDS", (0, 1))
    plain = DecodeConfig(max_new_tokens=12)
    own = [
        replace(plain, depth=2),
        replace(plain, shape="tree", choices=((0,), (1,), (0, 0)), depth=2),
        replace(plain, shape="dynamic", depth=2, nodes=5, width=2),
    ]
    monkeypatch.setattr(rules, "drafts", lambda: own)
    written: list[int] = []
    save = small_targets.write_report

    def count(stem: Path, content: dict[str, list[object]], lines: list[str]) -> None:
        written.append(len(content["rows"]))
        save(stem, content, lines)

    monkeypatch.setattr(small_targets, "write_report", count)
    out = tmp_path / "report"
    words = [f"mine={tmp_path / 'medusa'}", "--prompts", "1", "--threads", "1", "--out", str(out)]
    assert rules.main(words) == 0
    assert written == [3, 6, 8]  # after every draft, with a row of each of its rules
    content = json.loads(out.with_suffix(".json").read_text())
    assert [row["rule"] for row in content["rows"]] == [
        rule for shape in ("chain", "tree", "dynamic") for rule in RULES[shape]
    ]
    for row in content["rows"]:
        assert row["ours"]["tau"] >= 1
        if row["rule"] == rules.MATCH:
            assert row["ratio"] in (0, 1)  # 0 where no draft was accepted
    assert content["settings"]["prompts"] == 1
    assert f"mine={tmp_path / 'medusa'}" in content["command"]
    page = out.with_suffix(".md").read_text()
    assert page.count("| mine |") == 8
    assert rules.main(words) == 0
    assert len(json.loads(out.with_suffix(".json").read_text())["rows"]) == 8  # replaced


def test_a_drafter_without_a_folder_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert rules.main(["eagle3"]) == 2
    assert "'eagle3' names no checkpoint" in capsys.readouterr().err
