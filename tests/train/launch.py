"""Starts a test module as its own processes: alone, forked from one, or under torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


def command(processes: int, module: str, *arguments: object) -> list[str]:
    """The command line that runs `module` in so many processes."""
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        if processes > 1
        else []
    )
    return [sys.executable, *launcher, "-m", module, *map(str, arguments)]


def environment() -> dict[str, str]:
    """One thread each, the repository importable, nothing left over from another launch."""
    kept = {
        k: v
        for k, v in os.environ.items()
        if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")
    }
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY), "WANDB_MODE": "offline"}


def start(processes: int, module: str, *arguments: object) -> subprocess.Popen[str]:
    """Start `module`, several processes under torchrun; its output goes to a pipe, both streams in
    one."""
    return _started(command(processes, module, *arguments))


def _started(words: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        words,
        env=environment(),
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run(processes: int, module: str, *arguments: object, status: int = 0) -> str:
    """Run `module` to its end and return its output; fails the test unless it ends with `status`.
    Several processes are forked from one (tests/train/ranks.py).
    """
    words = [
        sys.executable,
        "-m",
        "tests.train.ranks",
        str(processes),
        module,
        *map(str, arguments),
    ]
    process = _started(words if processes > 1 else command(1, module, *arguments))
    output, _ = process.communicate(timeout=900)
    assert process.returncode == status, (
        f"ended with {process.returncode}, not {status}:\n{output[-4000:]}"
    )
    return output
