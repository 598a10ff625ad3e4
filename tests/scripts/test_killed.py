"""`kill -9` in the middle of generate and of train: the same command continues, and the result is that of a run left in peace."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts.cli import main
from tests.inference.tokenizers import save_micro_target

REPOSITORY = Path(__file__).resolve().parents[2]
PROMPTS = 24


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Overrides for a micro target with a few prompts."""
    folder = tmp_path_factory.mktemp("killed")
    target = save_micro_target(folder / "target")
    prompts = folder / "prompts.jsonl"
    rows = [{"id": str(n), "domain": "code", "prompt": f"Write function number {n}."} for n in range(PROMPTS)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        f"target.path={target}",
        "target.device=cpu",
        "data=jsonl",
        f"data.path={prompts}",
        "run.threads=1",
    ]


def run_and_kill(command: list[str], folder: Path, ready: Callable[[], bool]) -> None:
    """Start a stage in its own process and kill it as soon as `ready` says so; it must not have finished by then."""
    process = subprocess.Popen(
        [sys.executable, "-m", "scripts.cli", *command],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    deadline = time.monotonic() + 120
    while not ready():
        assert process.poll() is None, process.stderr.read().decode()[-2000:] if process.stderr else ""
        assert time.monotonic() < deadline, "the stage did not get to the point where it was to be killed"
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL


@pytest.mark.slow
def test_killed_stages_continue_to_the_same_result(given: list[str], in_folder: Path) -> None:
    generate = [
        "generate",
        *given,
        "sampling.max_new_tokens=48",
        "sampling.batch_size=2",
        "generate.flush_rows=2",
    ]
    train = [
        "train", *given[:2], "run.threads=1", "head=medusa", "engine=torch", "train.max_steps=12", "train.global_batch=2",
        "train.micro_batch=1", "train.sequence_length=96", "train.save_every=2", "train.eval_every=6", "train.eval_prompts=3",
        "train.eval_tokens=8", "decode.depth=2", "train.tracker.wandb=disabled",
    ]  # fmt: skip
    killed, calm = Path("outputs/killed"), Path("outputs/calm")

    parts = killed / "generate" / "parts"
    run_and_kill([*generate, "run.name=killed"], in_folder, lambda: len(list(parts.glob("*.parquet"))) >= 2)
    assert not (killed / "generate" / "manifest.json").exists()
    for name in ("killed", "calm"):
        assert main([*generate, f"run.name={name}"]) == 0
    first, second = (json.loads((run / "generate" / "manifest.json").read_text()) for run in (killed, calm))
    assert first["counts"] == second["counts"]
    assert first["counts"]["input"] == PROMPTS == first["counts"]["done"]
    assert first["shards"] == second["shards"]  # nothing lost, nothing doubled: the very same bytes

    states = killed / "train" / "medusa" / "checkpoints"
    run_and_kill([*train, "run.name=killed"], in_folder, lambda: (states / "step_00000004").is_dir())
    assert not (killed / "train" / "medusa" / "manifest.json").exists()
    for name in ("killed", "calm"):
        assert main([*train, f"run.name={name}"]) == 0
    weights = [
        (run / "train" / "medusa" / "best" / "model.safetensors").read_bytes() for run in (killed, calm)
    ]
    assert weights[0] == weights[1]
    steps = [
        [
            json.loads(line)["step"]
            for line in (run / "train" / "medusa" / "log.jsonl").read_text().splitlines()
        ]
        for run in (killed, calm)
    ]
    assert steps[0] == steps[1]
    record = json.loads((killed / "train" / "medusa" / "run.json").read_text())
    assert record["state"] == "complete"
    assert len(record["sessions"]) == 2
