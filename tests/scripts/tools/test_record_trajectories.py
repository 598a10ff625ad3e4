"""Trajectories are read from the records of a measurement, pass by pass."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from heads.api.errors import UserError
from scripts.tools import record_trajectories
from scripts.tools.replay import read_trajectories


def test_trajectories_are_recorded_from_measurements(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows: list[dict[str, Any]] = [{"fingerprint": "x"}]
    passes = [[2, 3, True], [1, 2, True], [0, 1, True]]
    record = {"arm": "eagle3", "prompt": "a", "repeat": 0, "tokens": [1], "seconds": {}}
    rows += [{**record, "passes": passes}]
    folder, path = tmp_path / "measure", tmp_path / "trajectories.json"
    folder.mkdir()
    (folder / "records.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    assert record_trajectories.main([f"eagle3={folder}", "--out", str(path)]) == 0
    assert json.loads(path.read_text(encoding="utf-8")) == {
        "eagle3": {"accepted": [2, 1], "source": "eagle3, 1 answers"}
    }
    assert read_trajectories(path)["eagle3"].accepted == (2, 1)
    assert record_trajectories.main(["eagle3", "--out", str(path)]) == 2
    assert "ARM=FOLDER" in capsys.readouterr().err
    with pytest.raises(UserError, match="record_trajectories"):
        read_trajectories(tmp_path / "nowhere.json")
