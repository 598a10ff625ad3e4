"""States on disk: complete or not there, everything in them comes back, damaged ones are passed
over."""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import SafetensorError

import train.state as state
from heads.api.errors import UserError
from tests.train.launch import start
from tests.train.toy import OPTIM, Toy, train_steps
from train.distributed import World
from train.engines.base import EngineConfig
from train.engines.torch_engine import TorchEngine
from train.state import STATE_FILE, StateStore, read_snapshot

RUN = {"kind": "toy"}


def trained(steps: int = 2) -> TorchEngine:
    engine = TorchEngine(Toy(), EngineConfig(name="torch", precision="float32"), OPTIM, World())
    train_steps(engine, World(), 4, 0, steps)
    return engine


def store(folder: Path, keep: int = 5, world: World | None = None) -> StateStore:
    return StateStore(folder / "checkpoints", keep, world or World())


def test_everything_comes_back(tmp_path: Path) -> None:
    engine = trained()
    random.seed(3), np.random.seed(4), torch.manual_seed(5)
    np.random.normal()  # leaves a second normal value cached
    store(tmp_path).save(2, engine, {"stale": 1, "tau": 1.25}, RUN)
    expected = [random.random(), np.random.normal(), float(np.random.rand()), float(torch.rand(()))]
    train_steps(engine, World(), 4, 2, 4)

    snapshot = store(tmp_path).newest()
    assert snapshot is not None
    assert (snapshot.step, snapshot.record, snapshot.run) == (2, {"stale": 1, "tau": 1.25}, RUN)
    toy = Toy()
    toy.load_state_dict(snapshot.weights())
    again = TorchEngine(toy, EngineConfig(name="torch", precision="float32"), OPTIM, World())
    snapshot.restore(again, World())
    assert expected == [
        random.random(),
        np.random.normal(),
        float(np.random.rand()),
        float(torch.rand(())),
    ]
    train_steps(again, World(), 4, 2, 4)
    assert all(
        torch.equal(again.weights()[name], value) for name, value in engine.weights().items()
    )


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    engine, states = trained(), store(tmp_path, keep=2)
    for step in (1, 20, 3, 100):
        states.save(step, engine, {}, RUN)
    assert sorted(path.name for path in states.directory.iterdir()) == [
        "step_00000020",
        "step_00000100",
    ]


def test_states_before_a_damaged_one_that_was_passed_over_are_kept(tmp_path: Path) -> None:
    engine, states = trained(), store(tmp_path, keep=1)
    damaged = states.save(4, engine, {}, RUN)
    (damaged / "model.safetensors").write_bytes(b"damaged")
    states.save(2, engine, {}, RUN)
    states.save(3, engine, {}, RUN)
    found = states.newest()
    assert found is not None and found.step == 3
    assert len(list(states.directory.iterdir())) == 2


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    engine, states = trained(), store(tmp_path)
    states.save(2, engine, {"tau": 1.0}, RUN)
    states.save(2, engine, {"tau": 2.0}, RUN)
    found = states.newest()
    assert found is not None
    assert found.record == {"tau": 2.0}


def test_half_written_folders_are_cleared_and_never_read(tmp_path: Path) -> None:
    states = store(tmp_path)
    assert states.newest() is None
    folder = states.save(2, trained(), {}, RUN)
    (folder.parent / "step_00000009.partial").mkdir()
    (folder.parent / "step_00000009.partial" / "model.safetensors").write_bytes(b"half")
    found = states.newest()
    assert found is not None
    assert found.step == 2
    assert [path.name for path in folder.parent.iterdir()] == ["step_00000002"]


def cut(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", 100)


def scramble(folder: Path) -> None:
    file = folder / "optimizer-0.safetensors"
    file.write_bytes(b"\xff" * file.stat().st_size)


def flip(folder: Path) -> None:
    file = folder / "optimizer-0.safetensors"
    content = bytearray(file.read_bytes())
    content[-5] ^= 4
    file.write_bytes(content)


def spoil_json(folder: Path) -> None:
    (folder / STATE_FILE).write_text("{", encoding="utf-8")


def drop(folder: Path) -> None:
    (folder / "random-0.json").unlink()


def flip_digit(folder: Path) -> None:
    text = (folder / STATE_FILE).read_text(encoding="utf-8")
    (folder / STATE_FILE).write_text(text.replace('"tokens": 1234', '"tokens": 1235'), "utf-8")


def foreign(folder: Path) -> None:
    (folder / STATE_FILE).write_text(json.dumps({"format": 99}), encoding="utf-8")


def test_leftovers_of_a_half_written_folder_do_not_enter_a_state(tmp_path: Path) -> None:
    states = store(tmp_path)
    (states.directory / "step_00000002.partial").mkdir(parents=True)
    (states.directory / "step_00000002.partial" / "optimizer-7.safetensors").write_bytes(b"half")
    folder = states.save(2, trained(), {}, RUN)
    assert not (folder / "optimizer-7.safetensors").exists()


@pytest.mark.parametrize("damage", [cut, scramble, flip, spoil_json, flip_digit, drop, foreign])
def test_a_damaged_newest_state_is_passed_over_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], None]
) -> None:
    states = store(tmp_path)
    states.save(2, trained(), {}, RUN)
    damage(states.save(4, trained(), {"tokens": 1234, "tau": (0.5, 0.25)}, RUN))
    with caplog.at_level(logging.WARNING):
        found = states.newest()
    assert found is not None
    assert found.step == 2
    assert "step_00000004" in caplog.text
    assert "Continuing from the state before it" in caplog.text


@pytest.mark.parametrize("damage", [cut, foreign])
def test_states_of_which_none_can_be_used_are_no_reason_to_start_again(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    states = store(tmp_path)
    assert states.newest() is None
    for step in (2, 4):
        damage(states.save(step, trained(), {}, RUN))
    with pytest.raises(UserError, match=r"no state in .*step_00000004.*step_00000002.*overwrite"):
        states.newest()


def test_a_state_is_checked_in_shares(tmp_path: Path) -> None:
    """Every process reads its share of the files through; between them they find a flipped bit that
    no size shows."""
    folder = store(tmp_path).save(2, trained(), {}, RUN)
    flip(folder)
    damages = []
    for share in range(2):
        try:
            read_snapshot(folder, share, 2)
        except UserError as error:
            damages.append(str(error))
    assert len(damages) == 1
    assert (
        "optimizer-0.safetensors' is damaged: its contents are not what was written" in damages[0]
    )


def test_damage_that_one_process_finds_counts_for_all(tmp_path: Path) -> None:
    states = store(tmp_path)
    states.save(2, trained(), {}, RUN)
    flip(states.save(4, trained(), {}, RUN))
    process = start(2, "tests.train.newest_worker", tmp_path)
    process.communicate(timeout=120)  # processes that disagree wait for one another
    assert [(tmp_path / f"{rank}.txt").read_text() for rank in range(2)] == ["2", "2"]


@pytest.mark.parametrize(("seen", "step"), [("late", "4"), ("never", "2")])
def test_all_processes_continue_from_one_state_although_they_see_others(
    tmp_path: Path, seen: str, step: str
) -> None:
    """The second process sees the newest state, which the main process lists, late or never."""
    states, others = store(tmp_path), tmp_path / "others"
    for number in (2, 4):
        states.save(number, trained(), {}, RUN)
    shutil.copytree(states.directory, others)
    if seen == "late":
        (others / "step_00000004").rename(others / "step_00000004.late")
    else:
        shutil.rmtree(others / "step_00000004")
    process = start(2, "tests.train.newest_worker", tmp_path)
    output, _ = process.communicate(timeout=120)
    assert [(tmp_path / f"{rank}.txt").read_text() for rank in range(2)] == [step, step]
    assert ("process 1 does not see" in output) == (seen == "never")


@pytest.mark.parametrize("obstacle", ["random_state", "state_file"])
def test_a_state_that_cannot_be_written_leaves_the_one_before(
    tmp_path: Path, obstacle: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    states, engine = store(tmp_path), trained()
    states.save(2, engine, {}, RUN)

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(
        state, "save_random_state" if obstacle == "random_state" else "write_json", full
    )
    with pytest.raises(
        UserError,
        match=r"cannot be written to .*the disk is full .*No space left on device.*Free some space.*"
        r" Earlier states are kept",
    ):
        states.save(4, engine, {}, RUN)
    monkeypatch.undo()
    found = states.newest()
    assert found is not None
    assert found.step == 2
    assert [path.name for path in states.directory.iterdir()] == ["step_00000002"]


def test_a_limit_that_safetensors_meets_is_told_from_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states, engine = store(tmp_path), trained()

    def limited(*arguments: object) -> None:
        raise SafetensorError("Error while serializing: I/O error: File too large (os error 27)")

    monkeypatch.setattr(state, "_save_tensors", limited)
    with pytest.raises(UserError, match=r"larger than the system allows .*ulimit -f"):
        states.save(2, engine, {}, RUN)


def test_no_file_is_a_pickle(tmp_path: Path) -> None:
    folder = store(tmp_path).save(2, trained(), {}, RUN)
    assert {path.suffix for path in folder.iterdir()} == {".json", ".safetensors"}
