"""The report on our drafters and those of `speculators`, without the library: what is kept is found
by what decided it, and a kind's rows take the place of its earlier ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from inference.manifest import write_json
from scripts.evidence import peers
from scripts.evidence.peers import Contest
from scripts.evidence.small_targets import PLACES, Place
from tests.train.micro_run import prepare


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    folder = prepare(tmp_path_factory.mktemp("micro"))
    prompts = folder / "prompts.jsonl"
    return Place(folder / "target", folder / "answers", prompts, prompts)


def test_their_training_is_done_again_with_other_flags(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    contest, done = Contest("python", place, tmp_path, 1, 1), []

    def train(kind: str, name: str, words: list[str], seed: int, out: Path) -> dict[str, int]:
        done.append((kind, words, seed))
        write_json(out / "weights.json", words)
        return {"steps": 1}

    monkeypatch.setattr(contest, "train_theirs", train)
    first = contest.trained("eagle3", "speculators", 1e-3, 0)
    assert contest.trained("eagle3", "speculators", 1e-3, 0) == first
    assert done == [("eagle3", ["--lr", "0.001"], 0)]
    monkeypatch.setattr(peers, "EPOCHS", 3)
    assert contest.trained("eagle3", "speculators", 1e-3, 0) != first


def test_the_report_keeps_other_kinds_and_says_its_command(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PLACES, "embedded", place)

    def compare(contest: Contest, kind: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        side = {"tau": 2.0, "tau_ci95": [1.9, 2.1]}
        row = {"temperature": 0.0, "rule": "match", "depth": 3, "ours": side, "theirs": side}
        facts = {"rate": 1e-3, "steps": 5}
        return [{**row, "ratio": 1.0, "ratio_ci95": [0.9, 1.1]}] * 2, {"ours": facts}

    monkeypatch.setattr(peers, "compare", compare)
    out = tmp_path / "report"
    words = ["--python", "P", "--targets", "embedded", "--work", str(tmp_path), "--out", str(out)]
    for kind in ("eagle3", "dflash", "eagle3"):
        assert peers.main([*words, "--threads", "1", "--prompts", "1", "--kinds", kind]) == 0
    content = json.loads(out.with_suffix(".json").read_text())
    assert [row["kind"] for row in content["rows"]] == ["dflash"] * 2 + ["eagle3"] * 2
    assert set(content["trainings"]["embedded"]) == {"dflash", "eagle3"}
    assert "--kinds eagle3" in content["command"]
    assert f"Made by `{content['command']}`" in out.with_suffix(".md").read_text()
