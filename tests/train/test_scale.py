"""One training, however it is run: 1, 2 or 4 processes, plain torch or ZeRO 0 to 3, offloaded,
checkpointed, on a divided target, and continued by another number of processes. The rows are the
same; losses, gradients and tau agree to float32's tolerance.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.train import launch
from tests.train.micro_run import settings
from train.run import train
from train.tracking.tracker import LOG_FILE, read_log

WORKER = "tests.train.scale_worker"
COMMON: dict[str, Any] = {
    "kind": "eagle3",
    "head": {"ttt_steps": 2},
    "max_steps": 4,
    "eval_every": 4,
    "save_every": 2,
    "micro_batch": 1,
    "keep": 3,
    "parity": False,
}
RUNS: dict[str, dict[str, Any]] = {
    "torch": {},
    **{f"zero{stage}": {"name": "deepspeed", "zero_stage": stage} for stage in range(4)},
    "checkpointed": {
        "name": "deepspeed",
        "zero_stage": 3,
        "engine": {"activation_checkpointing": True},
    },
    "offloaded": {"name": "deepspeed", "zero_stage": 3, "engine": {"offload": "all"}},
    "divided": {"name": "deepspeed", "zero_stage": 3, "engine": {"target_sharding": "zero3"}},
}


@pytest.fixture(scope="module")
def alone(micro: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One process, plain torch: what everything else must come to."""
    out = tmp_path_factory.mktemp("alone")
    train(out=out, **settings(micro, **COMMON))
    return out


def launched(processes: int, micro: Path, out: Path, names: list[str], **common: Any) -> None:
    """Run some of `RUNS` in one launch."""
    runs = [f"{name}={json.dumps(RUNS[name])}" for name in names]
    output = launch.run(processes, WORKER, micro, out, json.dumps({**COMMON, **common}), *runs)
    assert "Error" not in output


def curve(out: Path) -> list[dict[str, Any]]:
    """What the log says of every step, but for the clock."""
    names = (
        "step",
        "loss",
        "lr",
        "grad_norm",
        "tokens",
        "accuracy/depth1",
        "accuracy/depth2",
        "loss/depth2",
        "tau",
    )
    return [
        {name: line[name] for name in names if name in line} for line in read_log(out / LOG_FILE)
    ]


def same_curve(found: Path, expected: Path) -> None:
    assert len(curve(found)) == len(curve(expected))
    for mine, whole in zip(curve(found), curve(expected), strict=True):
        assert mine == pytest.approx(whole, rel=3e-5), found.name
    weights = [load_file(out / "best" / "model.safetensors") for out in (found, expected)]
    assert (
        max(float((weights[0][name] - weights[1][name]).abs().max()) for name in weights[1]) < 1e-4
    ), found.name


@pytest.mark.parametrize(
    ("processes", "names"),
    [
        (2, ["torch", "zero2", "divided"]),
        pytest.param(1, ["zero3"], marks=pytest.mark.slow),
        pytest.param(2, list(RUNS), marks=pytest.mark.slow),
        pytest.param(4, ["torch", "zero2", "divided"], marks=pytest.mark.slow),
    ],
)
def test_every_way_to_run_it_gives_one_curve(
    micro: Path, alone: Path, tmp_path: Path, processes: int, names: list[str]
) -> None:
    launched(processes, micro, tmp_path, names)
    for name in names:
        same_curve(tmp_path / name, alone)


@pytest.mark.slow  # a small drafter's: tests/train/engines/test_reshard.py
def test_a_training_goes_on_in_another_number_of_processes_under_another_engine(
    micro: Path, alone: Path, tmp_path: Path
) -> None:
    """Two processes with ZeRO-3, then four with ZeRO-1, then one with plain torch."""
    out = tmp_path / "moved"
    for processes, name, steps in ((2, "zero3", 2), (4, "zero1", 3)):
        pairs = [
            f"{key}={json.dumps(value)}"
            for key, value in {**COMMON, **RUNS[name], "leave_at": steps}.items()
        ]
        launch.run(processes, "tests.train.micro_run", micro, out, *pairs)
        newest = sorted(path.name for path in (out / "checkpoints").iterdir())[-1]
        assert newest == f"step_{steps:08d}"
        assert not (out / "manifest.json").exists()
    train(out=out, **settings(micro, **COMMON))
    same_curve(out, alone)
