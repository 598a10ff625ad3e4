"""Faults, injected for real: a few of them here, all of them by `python -m tests.chaos`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.chaos import __main__ as faults
from tests.chaos import ground as grounds
from tests.chaos.ground import FAILED, Fault, Ground, Outcome, UnsurvivedError


@pytest.mark.slow
def test_faults_are_survived_or_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    names = ["generate_killed", "train_killed", "nan_in_a_batch", "answers_flipped"]
    assert faults.main(["--folder", str(tmp_path), "--only", *names]) == 0, capfd.readouterr()


def test_a_stage_that_ends_before_the_fault_is_no_survival(tmp_path: Path) -> None:
    ground = Ground(tmp_path)
    with pytest.raises(UnsurvivedError, match="ended before the fault came"):
        ground.strike(["--version"], lambda: False)


def test_lost_doubled_and_different_are_failures(tmp_path: Path) -> None:
    """The comparison itself must be able to fail."""
    assert not Outcome("continued", lost=1).ok and not Outcome("continued", doubled=1).ok
    assert not Outcome("continued", identical=False).ok and not Outcome(FAILED).ok
    assert Outcome("refused").ok and Outcome("continued", identical=True).ok

    def case(ground: Ground) -> Outcome:
        raise UnsurvivedError(f"seen in {ground.folder}/outputs")

    row = faults.row_of("name", Fault("what", "where", case), Ground(tmp_path))
    assert (row["outcome"], row["ok"], row["words"]) == (FAILED, False, "seen in .../outputs")


def test_newer_rows_take_the_place_of_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = tmp_path / "faults.json"
    report.write_text(
        json.dumps(
            {
                "faults": [
                    {"name": "server_killed", "ok": True},
                    {"name": "train_killed", "ok": False},
                ]
            }
        )
    )
    monkeypatch.setattr(
        faults, "inject", lambda names, folder: [{"name": name, "ok": True} for name in names]
    )
    monkeypatch.setattr(faults, "show", lambda rows: None)
    assert (
        faults.main(["--out", str(report), "--only", "train_killed", "store_full_disk", "--update"])
        == 0
    )
    rows = json.loads(report.read_text())["faults"]
    assert [row["name"] for row in rows] == ["store_full_disk", "server_killed", "train_killed"]
    assert all(row["ok"] for row in rows)


def test_a_training_with_a_step_too_few_or_twice_is_seen(tmp_path: Path) -> None:
    for name, steps in (("calm", range(1, 11)), ("other", [1, 2, 3, 3, 4, 5, 6, 7, 8, 9])):
        folder = tmp_path / name
        (folder / "best").mkdir(parents=True)
        (folder / "best" / "model.safetensors").write_bytes(b"the same")
        grounds.write_lines(folder / "log.jsonl", [{"step": step, "loss": 1.0} for step in steps])
    found = Ground(tmp_path).compare_training(
        tmp_path / "other", "continued", calm=tmp_path / "calm"
    )
    assert (found.lost, found.doubled, found.identical) == (grounds.BATCH, grounds.BATCH, False)


def test_damage_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(100))
    grounds.flip_bit(path)
    assert sum(bin(byte).count("1") for byte in path.read_bytes()) == 1
    grounds.truncate(path)
    assert path.stat().st_size == 50
