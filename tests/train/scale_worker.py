"""Several whole trainings, one after the other, in as many processes as it was started with.

torchrun ... -m tests.train.scale_worker FOLDER OUT COMMON NAME=CHANGES ...   (JSON objects, as
tests.train.micro_run.settings)
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from tests.train.micro_run import settings
from train.run import train


def main(folder: str, out: str, common: str, *runs: str) -> None:
    """OUT/NAME for every run."""
    torch.set_num_threads(1)
    for run in runs:
        name, changes = run.split("=", 1)
        train(
            out=Path(out) / name,
            **settings(Path(folder), **{**json.loads(common), **json.loads(changes)}),
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
