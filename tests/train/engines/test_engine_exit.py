"""A finished run ends with status 0: gloo's worker threads must be done with Python before the
interpreter ends."""

from __future__ import annotations

import subprocess
import sys

import torch
import torch.distributed as dist

from tests.train.launch import REPOSITORY, environment
from train.distributed import join_world

TENSORS = 50_000


def test_a_process_that_ends_right_after_a_collective_ends_well() -> None:
    """So many tensors keep the worker busy with dropping them when the main thread is at its end;
    without `leave_world` the process aborts every time."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.train.engines.test_engine_exit", "collective"],
        env=environment(),
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    assert "Warning" not in done.stdout


if __name__ == "__main__":
    assert sys.argv[1:] == ["collective"]
    import warnings

    warnings.simplefilter("ignore", FutureWarning)
    join_world("cpu", always=True)
    dist.all_reduce_coalesced([torch.ones(1) for _ in range(TENSORS)])
