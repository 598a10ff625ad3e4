"""Runs `generate` as a program of its own and kills it where a test says, with signals that nothing
can catch.

    python -m tests.train.generate_worker '[{"out": ..., "data": ..., "target": ..., "kills":
    [["before", 3]]}]'

Every entry of a job's `kills` is one run in a forked process, so that torch is imported once.
["before", k] and ["after", k] send SIGKILL around the k-th file that is put in its place; ["term",
k] sends SIGTERM after the k-th answer; null lets the run finish. The exit statuses are printed as
JSON, a list for each job. Under a launcher nothing is forked: the one job's first kill hits the
process with RANK 1, and the others run undisturbed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import inference.manifest
import train.generate.loop
from inference.decoding.config import DecodeConfig
from inference.target.loading import TargetConfig
from train.data.config import DataConfig
from train.generate.config import GenerateConfig
from train.generate.run import generate


def run(job: dict[str, Any]) -> None:
    generate(
        GenerateConfig(**job.get("config", {})),
        DataConfig(**job["data"]),
        DecodeConfig(**job["decode"]),
        TargetConfig(job["target"], dtype="float64", device="cpu"),
        Path(job["out"]),
    )


def kill_at(moment: str, number: int) -> None:
    """Arrange the death of this process."""
    if moment == "term":
        sample = train.generate.loop.sample_answers

        def terminated(*arguments):
            for count, outcome in enumerate(sample(*arguments), 1):
                yield outcome
                if count == number:
                    os.kill(os.getpid(), signal.SIGTERM)

        train.generate.loop.sample_answers = terminated
        return
    replace, seen = os.replace, 0

    def replaced(*arguments):
        nonlocal seen
        seen += 1
        if seen == number and moment == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        replace(*arguments)
        if seen == number:
            os.kill(os.getpid(), signal.SIGKILL)

    inference.manifest.os.replace = replaced


def forked(job: dict[str, Any], kill: list[Any] | None) -> int:
    """Exit status of one run in a process of its own; negative when a signal ended it."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if kill is not None:
        kill_at(*kill)
    status = 0
    try:
        run(job)
    except SystemExit as leaving:
        status = int(leaving.code or 0)
    os._exit(status)


def main() -> None:
    jobs = json.loads(sys.argv[1])
    if "RANK" not in os.environ:
        print(json.dumps([[forked(job, kill) for kill in job["kills"]] for job in jobs]))
        return
    (job,) = jobs
    if os.environ["RANK"] == "1" and job["kills"]:
        kill_at(*job["kills"][0])
    run(job)


if __name__ == "__main__":
    main()
