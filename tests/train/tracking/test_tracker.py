"""The log: one line per event, nothing doubled after a resume, no secrets."""

from __future__ import annotations

import json
import math
import signal
from pathlib import Path

import pytest

from heads.api.errors import UserError
from tests import forked
from tests.train.launch import environment
from train.tracking.tracker import (
    ID_FILE,
    LOG_FILE,
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
