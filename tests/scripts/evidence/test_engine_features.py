"""The report on vLLM's features, on the smallest target, with a stand-in for vLLM."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from scripts.evidence import engine_features, small_targets
from scripts.evidence.engine_features import EngineRun, difference
from scripts.tools.common import cpu_target
from tests.scripts.evidence.places import micro_place
from tests.train.features.vllm_stub import serving


@pytest.mark.slow
def test_the_report_on_the_smallest_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place = micro_place(tmp_path)
    monkeypatch.setitem(small_targets.PLACES, "embedded", place)
    starts: list[str] = []

    @contextmanager
    def stand_in(run: EngineRun) -> Iterator[None]:
        starts.append(run.command)
        run.work.mkdir(parents=True, exist_ok=True)
        target = cpu_target(place.target, run.dtype)
        longest = engine_features.LENGTH + 1
        with serving(target, Path(run.config.states), run.config.layers, longest=longest) as stub:
            run.config = replace(run.config, servers=(stub.address,))
            yield

    monkeypatch.setattr(EngineRun, "serving", stand_in)
    out = tmp_path / "report"
    words = ["--heads", "eagle3", "--dtypes", "float32", "--seeds", "1", "--steps", "2"]
    words += ["--documents", "3", "--prompts", "1", "--threads", "1"]
    words += ["--work", str(tmp_path / "work"), "--out", str(out)]
    assert engine_features.main(words) == 0, capsys.readouterr().err
    content = json.loads(out.with_suffix(".json").read_text())
    states = content["layers"]["float32"]["states"]
    assert list(states) == ["tap 0", "tap 1", "tap 2", "last hidden"]
    for facts in states.values():
        assert facts["relative"] <= facts["largest"] < 1e-5
    (row,) = content["rows"]
    assert row["head"] == "eagle3"
    assert row["online"]["tau"] == pytest.approx(row["vllm"]["tau"], abs=0.2)
    assert 0 < row["parity"]["worst"] <= row["parity"]["allowed"]
    assert "| eagle3 | float32 | 1 |" in out.with_suffix(".md").read_text()
    assert engine_features.main(words) == 0
    assert len(starts) == 1  # the second time nothing was missing


def test_differences_are_relative_to_ours() -> None:
    mine = torch.tensor([[3.0, 4.0], [0.0, 10.0]])
    theirs = mine + torch.tensor([[0.0, 1.0], [0.0, 0.0]])
    found = difference(theirs, mine)
    assert found["largest"] == pytest.approx(0.2)
    assert found["relative"] == pytest.approx(1 / 125**0.5)
