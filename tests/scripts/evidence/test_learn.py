"""The report on learning from traffic: the whole command on a small target."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from heads.api.checkpoint import build_config, new_drafter, save_drafter
from scripts.assets import changed_targets, drifting
from scripts.evidence import learn
from scripts.tools.common import ROOT, cpu_target
from tests.scripts.assets.test_drifting import few_pairs

SMALL = ROOT / "assets" / "tiny-target-small"


@pytest.mark.slow
def test_the_whole_command_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drifting, "python_pairs", few_pairs)
    recipe = changed_targets.Recipe(steps=2, tokens_per_step=512)
    monkeypatch.setattr(learn, "RECIPES", {"finetuned": recipe, "merged": recipe})
    monkeypatch.setattr(learn, "COMPARISONS", 4)
    monkeypatch.setattr(learn, "REFRESH_PROMPTS", 8)
    target = cpu_target(SMALL)
    config = build_config("distilled", {"from_target_layers": [0]})
    fresh = new_drafter("distilled", config, target.info, target.weights, seed=0)
    save_drafter(fresh, tmp_path / "drafter", target.info)
    out, work = tmp_path / "report", tmp_path / "work"
    words = "--requests 40 --minutes 0.1 --clients 2 --tokens 8 --steps 2 --learner-steps 2".split()
    words += "--least-tokens 40 --pairs 20 --phases python finetuned".split()
    words += ["--drafter", str(tmp_path / "drafter"), "--target", str(SMALL)]
    words += ["--work", str(work), "--out", str(out)]
    assert learn.main(words) == 0
    content = json.loads(out.with_suffix(".json").read_text())
    assert [phase["name"] for phase in content["phases"]] == ["python", "finetuned"]
    totals = content["totals"]
    assert totals["sent"] == totals["answered"] == totals["compared"] == 80
    assert totals["lost"] == totals["mismatches"] == 0
    first, second = content["phases"]
    assert first["refresh"] is None and second["refresh"]["answers"] == 8
    assert second["cost"]["tokens"] >= second["refresh"]["tokens"] > 0
    assert first["probes"] == 8 and first["retraining"]["steps"] == 2
    assert content["holds"]["no_request_lost"]
    assert not content["holds"]["all_answers_as_plain_decoding"]  # too few
    text = out.with_suffix(".md").read_text()
    assert "| finetuned |" in text and "favours" not in text
    del content["settings"]["probes_in_all_phases"]  # as in a report of an earlier version
    assert "which favours **learned** there" in "\n".join(learn.page(content))
    begun = (work / "phases" / "python" / "served.jsonl").stat().st_mtime
    assert learn.main(words) == 0  # all of it is there
    assert json.loads(out.with_suffix(".json").read_text())["phases"] == content["phases"]
    assert (work / "phases" / "python" / "served.jsonl").stat().st_mtime == begun
    assert learn.main([*words, "--tokens", "9"]) == 2


def test_a_drafter_without_a_folder_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert learn.main(["--drafter", str(tmp_path / "x"), "--work", str(tmp_path)]) == 2
    assert "there is no folder" in capsys.readouterr().err
