"""N steps equal N/2 steps, a kill, and N/2 more: weights, optimiser, generators, log. Real
processes, really killed."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import train.state as state
from heads.api.errors import UserError
from tests.train import launch
from tests.train.micro_run import settings
from train import setup
from train.distributed import World
from train.loop import Evaluation, Trainer
from train.refresh import RefreshConfig
from train.run import train
from train.state import StateStore
from train.tracking.tracker import LOG_FILE, Tracker, read_log

WORKER = "tests.train.micro_run"
CLOCK = ("seconds", "tokens_per_second", "cost")
STEPS = 14
DEADLINE_SECONDS = 600


def same_log(one: Path, other: Path) -> None:
    logs = [
        [{k: v for k, v in line.items() if k not in CLOCK} for line in read_log(out / LOG_FILE)]
        for out in (one, other)
    ]
    assert logs[0] == logs[1]


def same_outcome(one: Path, other: Path) -> None:
    """Equal to the last bit: the best checkpoint, the newest state with everything in it, the log
    but for its clock."""
    same_log(one, other)
    assert (one / "best" / "model.safetensors").read_bytes() == (
        other / "best" / "model.safetensors"
    ).read_bytes()
    states = [sorted((out / "checkpoints").iterdir())[-1] for out in (one, other)]
    assert states[0].name == states[1].name == f"step_{STEPS:08d}"
    for path in sorted(states[0].iterdir()):
        if path.name != "state.json":
            assert path.read_bytes() == (states[1] / path.name).read_bytes(), path.name
    assert load_file(states[0] / "optimizer-0.safetensors"), "the state of AdamW must not be empty"


def wait_for(process: subprocess.Popen[str], seen: Callable[[], bool]) -> None:
    """Return as soon as `seen`; fails the test when the process ends first."""
    end = time.monotonic() + DEADLINE_SECONDS
    while not seen():
        assert process.poll() is None, f"ended early:\n{process.communicate()[0][-3000:]}"
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.005)


def log_lines(out: Path) -> int:
    path = out / LOG_FILE
    return path.read_bytes().count(b"\n") if path.is_file() else 0


def pairs(**values: Any) -> list[str]:
    """The worker's arguments."""
    return [f"{key}={json.dumps(value)}" for key, value in values.items()]


@pytest.mark.parametrize(
    ("stop_at", "head"), [(1, {}), (4, {"num_anchors": 5}), (7, {}), (13, {})], ids=str
)
def test_half_and_half_is_the_whole_in_plain_torch(
    micro: Path, tmp_path: Path, stop_at: int, head: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = settings(
        micro, kind="eagle3", head=head, max_steps=STEPS, save_every=3, eval_every=5
    )
    train(out=tmp_path / "whole", **arguments)
    cut_short(monkeypatch, stop_at)
    with pytest.raises(Killed):
        train(out=tmp_path / "parts", **arguments)
    monkeypatch.undo()
    train(out=tmp_path / "parts", **arguments)
    same_outcome(tmp_path / "whole", tmp_path / "parts")


class Killed(BaseException):
    """Nobody catches it: the run ends where it is."""


def cut_short(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """End the run right after the log line of `step`, before anything of that step is saved."""
    plain = Tracker.write

    def write(self: Tracker, at: int, figures: Any) -> None:
        plain(self, at, figures)
        if at == step:
            raise Killed

    monkeypatch.setattr(Tracker, "write", write)


def test_prompts_are_trained_on_and_another_weight_of_theirs_is_told(
    micro: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = {}
    for weight in (0.0, 0.5, 1.0):
        out = tmp_path / f"{weight:g}"
        train(out=out, **settings(micro, max_steps=2, eval_every=0, context_weight=weight))
        found[weight] = (out / "best" / "model.safetensors").read_bytes()
    assert len({*found.values()}) == 3
    (tmp_path / "0.5" / "manifest.json").unlink()
    train(out=tmp_path / "0.5", **settings(micro, max_steps=3, eval_every=0, context_weight=0.25))
    assert "'context_weight': 0.5" in caplog.text and "'context_weight': 0.25" in caplog.text


def test_a_continuation_that_measures_no_tau_claims_none(
    micro: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The best of an earlier session is not the last weights, which are kept then."""
    with monkeypatch.context() as patch:
        cut_short(patch, 7)
        with pytest.raises(Killed):
            train(out=tmp_path, **settings(micro, max_steps=STEPS, save_every=3, eval_every=5))
    manifest = train(out=tmp_path, **settings(micro, max_steps=STEPS, save_every=3, eval_every=0))
    assert manifest["best"] == {"step": STEPS, "tau": None, "tau_ci95": None}


def test_killed_while_saving(micro: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = settings(micro, max_steps=STEPS, save_every=4, eval_every=5)
    train(out=tmp_path / "whole", **arguments)
    plain, calls = state.save_random_state, iter(range(10))

    def save(folder: Path, rank: int) -> None:
        if next(calls) == 1:  # the second save, after its weights were written
            raise Killed
        plain(folder, rank)

    monkeypatch.setattr(state, "save_random_state", save)
    with pytest.raises(Killed):
        train(out=tmp_path / "parts", **arguments)
    monkeypatch.undo()
    folders = sorted(path.name for path in (tmp_path / "parts" / "checkpoints").iterdir())
    assert folders == ["step_00000004", "step_00000008.partial"]
    train(out=tmp_path / "parts", **arguments)
    same_outcome(tmp_path / "whole", tmp_path / "parts")


def test_a_best_that_the_state_does_not_know_is_replaced_by_the_next(
    micro: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As after a kill between the best and the state, if the same steps then measure less."""
    found = iter([Evaluation(tau, (tau, tau)) for tau in (1.2, 1.5, 1.1, 1.0)])
    monkeypatch.setattr(setup.Run, "evaluate", lambda *given: next(found))
    arguments = settings(micro, max_steps=6, eval_every=2, save_every=2)
    plain = Trainer.save

    def save(trainer: Trainer) -> None:
        if trainer.progress.step == 4:
            raise Killed
        plain(trainer)

    with monkeypatch.context() as killing:
        killing.setattr(Trainer, "save", save)
        with pytest.raises(Killed):
            train(out=tmp_path, **arguments)
    manifest = train(out=tmp_path, **arguments)
    assert manifest["best"] == {"step": 4, "tau": 1.1, "tau_ci95": [1.1, 1.1]}
    assert "does not hold the weights of step 2" in caplog.text


def test_a_start_may_lie_elsewhere_when_its_training_continues(micro: Path, tmp_path: Path) -> None:
    def run(out: str, start: str = "", steps: int = 1) -> None:
        refresh = RefreshConfig(init_from=start and str(tmp_path / start / "best"))
        given = settings(micro, max_steps=steps, eval_every=0, parity=False, refresh=refresh)
        train(out=tmp_path / out, **given)

    run("base")
    run("out", "base")
    (tmp_path / "base").rename(tmp_path / "moved")
    (tmp_path / "out" / "manifest.json").unlink()
    shutil.copytree(tmp_path / "out", tmp_path / "other")
    run("out", "moved", steps=2)
    with pytest.raises(UserError, match="another training: base was"):
        run("other", "out", steps=2)


def test_a_damaged_newest_state_costs_steps_but_no_bit(
    micro: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = settings(micro, max_steps=STEPS, save_every=3, eval_every=5)
    train(out=tmp_path / "whole", **arguments)
    cut_short(monkeypatch, 11)
    with pytest.raises(Killed):
        train(out=tmp_path / "parts", **arguments)
    monkeypatch.undo()
    (tmp_path / "parts" / "checkpoints" / "step_00000009" / "model.safetensors").write_bytes(b"")
    train(out=tmp_path / "parts", **arguments)
    same_outcome(tmp_path / "whole", tmp_path / "parts")


DEEPSPEED = {
    "name": "deepspeed",
    "zero_stage": 2,
    "precision": "bfloat16",
    "save_every": 3,
    "eval_every": 5,
}


@pytest.fixture(scope="module")
def whole(micro: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run under DeepSpeed."""
    out = tmp_path_factory.mktemp("whole")
    train(out=out, **settings(micro, max_steps=STEPS, **DEEPSPEED))
    return out


@pytest.mark.parametrize(
    "number",
    [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)],  # below with two
)
def test_a_deepspeed_run_continues_after_a_signal(
    micro: Path, whole: Path, tmp_path: Path, number: signal.Signals
) -> None:
    process = launch.start(
        1, WORKER, micro, tmp_path, *pairs(**DEEPSPEED, max_steps=STEPS, slow=0.1)
    )
    wait_for(process, lambda: log_lines(tmp_path) >= 6)
    process.send_signal(number)
    output, _ = process.communicate(timeout=DEADLINE_SECONDS)
    assert process.returncode == (0 if number == signal.SIGTERM else -signal.SIGKILL), output
    assert ("the same command continues there" in output) == (number == signal.SIGTERM)
    assert not (tmp_path / "manifest.json").exists()
    train(out=tmp_path, **settings(micro, max_steps=STEPS, **DEEPSPEED))
    same_outcome(whole, tmp_path)


@pytest.mark.slow  # three launches under ZeRO-3; quicker: tests/train/engines/test_reshard.py
def test_two_processes_stop_together_and_continue(micro: Path, tmp_path: Path) -> None:
    """SIGTERM reaches one of them only; each has its own part of the optimiser's state."""
    changes = {
        "name": "deepspeed",
        "zero_stage": 3,
        "save_every": 3,
        "eval_every": 7,
        "max_steps": STEPS,
    }
    launch.run(2, WORKER, micro, tmp_path / "whole", *pairs(**changes))
    output = launch.run(2, WORKER, micro, tmp_path / "parts", *pairs(**changes, leave_at=5))
    assert "state of step 5 saved" in output
    newest = StateStore(tmp_path / "parts" / "checkpoints", 2, World()).newest()
    assert newest is not None
    assert (newest.step, newest.processes, newest.sharded) == (5, 2, True)
    launch.run(2, WORKER, micro, tmp_path / "parts", *pairs(**changes))
    same_outcome(tmp_path / "whole", tmp_path / "parts")
    second = load_file(
        tmp_path / "whole" / "checkpoints" / f"step_{STEPS:08d}" / "optimizer-1.safetensors"
    )
    assert any(name.endswith("exp_avg") for name in second)
