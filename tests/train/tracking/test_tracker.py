"""The log: one line per event, nothing doubled after a resume, no secrets."""

from __future__ import annotations

import json
import math
import signal
import sys
import time
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

from heads.api.errors import UserError
from tests import forked
from tests.train.launch import environment
from train.tracking.tracker import (
    ID_FILE,
    LOG_FILE,
    TENSORBOARD,
    Tracker,
    TrackerConfig,
    read_log,
    without_secrets,
)

OFF = TrackerConfig(wandb="disabled")


def tracker(out: Path, length: int = 0, **changes: object) -> Tracker:
    return Tracker(OFF, out, length=length, settings={}, **changes)  # type: ignore[arg-type]


def test_lines_are_json_with_their_step(tmp_path: Path) -> None:
    with tracker(tmp_path) as log:
        log.write(1, {"loss": 2.5, "accuracy/depth1": 0.5})
        log.write(2, {"loss": math.inf, "best": True})
    assert read_log(tmp_path / LOG_FILE) == [
        {"step": 1, "loss": 2.5, "accuracy/depth1": 0.5},
        {"step": 2, "loss": None, "best": True},
    ]


def test_what_came_after_the_state_is_cut_when_it_continues(tmp_path: Path) -> None:
    with tracker(tmp_path) as log:
        log.write(1, {"loss": 1.0})
        log.write(1, {"tau": 2.0})
        length = log.flush()
        log.write(2, {"loss": 3.0})
    with (tmp_path / LOG_FILE).open("ab") as file:
        file.write(b'{"step": 3, "lo')  # a kill in the middle of a line
    assert [line["step"] for line in read_log(tmp_path / LOG_FILE)] == [1, 1, 2]
    with tracker(tmp_path, length) as log:
        log.write(2, {"loss": 4.0})
    assert [list(line.values()) for line in read_log(tmp_path / LOG_FILE)] == [
        [1, 1.0],
        [1, 2.0],
        [2, 4.0],
    ]


def test_a_new_run_starts_an_empty_log(tmp_path: Path) -> None:
    for _ in range(2):
        with tracker(tmp_path) as log:
            log.write(1, {})
    assert len(read_log(tmp_path / LOG_FILE)) == 1


def test_other_processes_write_nothing(tmp_path: Path) -> None:
    with tracker(tmp_path / "out", active=False) as log:
        log.write(1, {"loss": 1.0})
        assert log.flush() == 0
    assert not (tmp_path / "out").exists()


def events(out: Path) -> list[tuple[int, dict[str, float]]]:
    """Step and values of every summary in the only event file, as TensorBoard reads it."""
    (path,) = (out / TENSORBOARD).iterdir()
    return [
        (event.step, {each.tag: each.simple_value for each in event.summary.value})
        for event in LegacyEventFileLoader(str(path)).Load()
        if event.HasField("summary")
    ]


def test_tensorboard_shows_every_step_once_also_after_a_kill(tmp_path: Path) -> None:
    config = TrackerConfig(wandb="disabled", tensorboard=True)
    with Tracker(config, tmp_path, length=0, settings={}) as log:
        log.write(1, {"loss": 1.5, "cost": {"target": 0.25, "mfu": 0.5}, "name": "x"})
        length = log.flush()
        log.write(300, {"loss": 3.0})  # after the state
    assert [step for step, _ in events(tmp_path)] == [1, 300]
    with Tracker(config, tmp_path, length=length, settings={}) as log:
        log.write(300, {"loss": 4.0, "gap": math.nan, "best": True})
    assert events(tmp_path) == [
        (1, {"loss": 1.5, "cost/target": 0.25, "cost/mfu": 0.5}),
        (300, {"loss": 4.0, "best": 1.0}),
    ]


def test_without_tensorboard_the_error_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto.event_pb2", None)
    config = TrackerConfig(wandb="disabled", tensorboard=True)
    with pytest.raises(UserError, match=r"\.\[tracking\]"):
        Tracker(config, tmp_path, length=0, settings={})


def test_weights_and_biases_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_MODE", raising=False)
    settings = {"kind": "eagle3", "optim": {"lr": 1e-3}, "hub_token": "hf_abcdef"}
    with Tracker(TrackerConfig(tags=("first-tag",)), tmp_path, length=0, settings=settings) as log:
        log.write(1, {"loss": 2.0})
        log.write(1, {"tau": 1.5, "tau_ci95": [1.0, 2.0]})
    (file,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    end = time.monotonic() + 60
    while b"tau" not in file.read_bytes() and time.monotonic() < end:
        time.sleep(
            0.05
        )  # wandb's own process ends the file a moment after it has said that it is done
    content = b"".join(
        path.read_bytes() for path in (tmp_path / "wandb").rglob("*") if path.is_file()
    )
    for word in (b"tau", b"first-tag", b"headstart", b"eagle3"):
        assert word in content, word
    assert b"hf_abcdef" not in content
    assert file.stem == f"run-{(tmp_path / ID_FILE).read_text().strip()}"
    assert not list(tmp_path.glob("*.partial"))


KILLED = """
import os, signal, sys
from pathlib import Path
from train.tracking.tracker import Tracker, TrackerConfig
log = Tracker(TrackerConfig(), Path(sys.argv[1]), length=0, settings={})
log.write(1, {"loss": 2.0})
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_a_run_killed_before_its_first_save_is_the_same_weights_and_biases_run_again(
    tmp_path: Path,
) -> None:
    # wandb's service of this process, where an earlier test has started it, would take the run for
    # one that still goes on
    own = {name: value for name, value in environment().items() if "WANDB_SERVICE" not in name}
    done = forked.run("-c", KILLED, tmp_path, env=own)
    assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]
    with Tracker(
        TrackerConfig(), tmp_path, length=0, settings={}
    ) as log:  # no state: from the beginning, in the same run
        log.write(1, {"loss": 2.0})
    names = sorted(path.name for path in (tmp_path / "wandb").glob("offline-run-*"))
    assert names
    ids = {
        name.split("-")[3] for name in names
    }  # offline-run-<time>-<id>, with a number behind it where that is taken
    assert ids == {(tmp_path / ID_FILE).read_text().strip()}
    assert [line["step"] for line in read_log(tmp_path / LOG_FILE)] == [1]


def test_secrets_are_left_out_at_any_depth() -> None:
    settings = {
        "api_key": "a",
        "optim": {"lr": 1, "password": "b", "nested": {"HF_TOKEN": "c", "tokens": 5}},
        "eval_tokens": 64,
        "target": {"tokenizer_hash": "d"},
    }
    kept = without_secrets(settings)
    assert kept == {
        "optim": {"lr": 1, "nested": {"tokens": 5}},
        "eval_tokens": 64,
        "target": {"tokenizer_hash": "d"},
    }
    json.dumps(kept)


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(UserError, match="Did you mean 'offline'"):
        TrackerConfig(wandb="ofline")
