"""That the comparisons of the attacks can fail; the attacks themselves: `make test-chaos`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos import faults
from tests.chaos import ground as grounds
from tests.chaos.ground import FAILED, Fault, Ground, Outcome, UnsurvivedError


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

    row = faults.inject("name", Fault("what", "where", case), Ground(tmp_path))
    assert (row.tried, row.failed, row.words) == (1, 1, ["seen in .../outputs"])


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
