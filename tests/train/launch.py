"""Starts a test module as its own processes: one, or several of one launch, forked with all imports
done (tests/forked.py)."""

from __future__ import annotations

import os
from pathlib import Path

from tests import forked

REPOSITORY = Path(__file__).resolve().parents[2]


def environment() -> dict[str, str]:
    """One thread each, the repository importable, nothing left over from another launch."""
    kept = {
        k: v
        for k, v in os.environ.items()
        if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")
    }
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY), "WANDB_MODE": "offline"}


def start(processes: int, module: str, *arguments: object) -> forked.Process:
    """Start `module`, several processes as tests/train/ranks.py does it; its output goes to a pipe,
    both streams in one."""
    words = [module, *arguments]
    if processes > 1:
        words = ["tests.train.ranks", processes, *words]
    return forked.start(*map(str, words), env=environment())


def run(processes: int, module: str, *arguments: object, status: int = 0) -> str:
    """Run `module` to its end and return its output; fails the test unless it ends with
    `status`."""
    process = start(processes, module, *arguments)
    output, _ = process.communicate(timeout=900)
    assert process.returncode == status, (
        f"ended with {process.returncode}, not {status}:\n{output[-4000:]}"
    )
    return output
