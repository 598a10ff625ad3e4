"""One training of Headstart's, step by step on command: the other side of scripts/speculators_worker.py, with the same protocol.

    python -m scripts.speculators_ours job.json

The job names overrides of `headstart train`; data, drafter, engine and step are those of `train.setup.Run` and of
`train.loop.Trainer`.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from scripts.config import load_settings
from scripts.speculators_worker import Channel, peak_bytes
from scripts.stages import STAGES
from train.config import TrainingJob
from train.distributed import join_world
from train.engines.base import TrainEngine
from train.engines.make import make_engine
from train.loop import Limits, Progress, Trainer
from train.memory import keep_freed_memory
from train.optim import learning_rate
from train.setup import Run
from train.state import StateStore
from train.stopping import StopRequest
from train.tracking.display import Display
from train.tracking.meter import Meter
from train.tracking.tracker import Tracker


def build(job: dict[str, Any]) -> tuple[Run, TrainEngine]:
    """The run and the engine around a fresh drafter."""
    settings = load_settings(STAGES["train"], job["overrides"])
    world = join_world(torch.device("cpu"))
    keep_freed_memory()
    told = TrainingJob(
        settings.head.kind, settings.head.config, settings.target, Path(job["answers"]), Path(job["out"]), settings.train,
        settings.features, settings.engine, settings.optim, settings.schedule, settings.decode, settings.joint,
    )  # fmt: skip
    run = Run(told, world)
    return run, make_engine(run.drafter, settings.engine, settings.optim, world)


def follow(run: Run, engine: TrainEngine, channel: Channel) -> None:
    """Take the steps that are asked for, through the trainer's own step."""
    job, out = run.job, run.job.out
    tracker = Tracker(job.config.tracker, out, length=0, settings=run.facts, active=True)
    with Display("", run.steps, 0, active=False) as display, tracker, StopRequest() as request:
        progress = Progress()
        trainer = Trainer(
            engine=engine, features=run.features(), loader=run.loader,
            rate=lambda step: learning_rate(step, run.steps, job.optim.lr, job.schedule),
            evaluate=None, keep_best=run.keep_best, store=StateStore(out / "checkpoints", 1, run.world), tracker=tracker,
            display=display, world=run.world, limits=Limits(run.steps, 0, 0, 0, 0.0), run_facts=run.facts, progress=progress,
            meter=Meter(run.world.device, job.engine.dtype, progress.spent),
        )  # fmt: skip
        stream = run.loader.iterate(0, 1_000_000)
        for command in channel.commands():
            if command["do"] == "save":
                run.write_checkpoint(engine.weights(), Path(command["to"]))
                channel.say(saved=command["to"])
                continue
            begun, before = time.perf_counter(), trainer.progress.tokens
            for _ in range(command["count"]):
                trainer.step(*next(stream), request)
            seconds = time.perf_counter() - begun
            channel.say(seconds=seconds, tokens=trainer.progress.tokens - before, peak_bytes=peak_bytes())


def main() -> int:
    """Build, say so, and follow commands."""
    channel = Channel()
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    torch.set_num_threads(job["threads"])
    run, engine = build(job)
    weights = sum(p.numel() for p in run.drafter.parameters() if p.requires_grad)
    channel.say(ready=True, trained_weights=weights, steps_per_epoch=run.loader.steps_per_epoch)
    follow(run, engine, channel)
    return 0


if __name__ == "__main__":
    sys.exit(main())
