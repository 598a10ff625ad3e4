"""`train(...)` trains a drafter on a folder of answers and keeps the one with the best tau.

    <out>/best/            the drafter with the best tau, in the target's dtype, as measured
    <out>/checkpoints/     the newest full states, from which the same call continues bit for bit
    <out>/log.jsonl        one line per step and per evaluation
    <out>/summary.json     costs and results, with tau.png beside it
    <out>/manifest.json    written last

Training is compared with decoding (`inference.parity`) before the first step and after the last.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from inference.decoding.config import DecodeConfig
from inference.manifest import MANIFEST_FILE
from inference.target.loading import TargetConfig, pick_device
from inference.writers import only_writer
from train.config import TrainConfig, TrainingJob, refuse_senseless, with_prompts
from train.distributed import join_world
from train.engines.base import EngineConfig
from train.features.config import FeaturesConfig
from train.features.group import run_in_group
from train.joint.config import JointConfig
from train.joint.run import JointRun
from train.manifest import TrainManifest, read_training
from train.memory import keep_freed_memory
from train.optim import OptimConfig, ScheduleConfig
from train.setup import Run
from train.target.parts import refuse_parts


def train(
    kind: str,
    head: Any,
    *,
    target: TargetConfig,
    data: Path,
    out: Path,
    config: TrainConfig,
    features: FeaturesConfig,
    engine: EngineConfig,
    optim: OptimConfig,
    schedule: ScheduleConfig,
    decode: DecodeConfig,
    joint: JointConfig | None = None,
    provenance: Mapping[str, object] | None = None,
) -> TrainManifest:
    """Train a drafter of `kind` on the answers in `data` and return the manifest written to `out`.
    Every process of a launch calls this. An interrupted training continues; a finished one is left
    as it is.

    decode: draft shape and sampling under which tau is measured; joint: whether the target is
    trained too (see train/joint/run.py). Raises `UserError` for invalid arguments, and
    `train.stopping.Stopped` (a SystemExit) after a signal, once the state is saved.
    """
    begun = time.perf_counter()
    settings = (config, features, engine, optim, schedule, decode, joint or JointConfig())
    job = TrainingJob(kind, head, target, data, out, *settings)
    if (out / MANIFEST_FILE).is_file():
        return read_training(out)
    refuse_senseless(job)
    refuse_parts(job)
    with only_writer(out):
        return run_job(with_prompts(job), begun, provenance)


def run_job(
    job: TrainingJob, begun: float, provenance: Mapping[str, object] | None
) -> TrainManifest:
    """Run the training in a folder that only this launch writes to."""
    target = job.target
    world = join_world(pick_device(target.device))
    if world.device.type == "cpu":
        keep_freed_memory()
    job = replace(job, target=replace(target, device=str(world.device)))
    if job.joint.on:
        return JointRun(job, world, begun).run(provenance)
    if job.features.mode == "group":
        return run_in_group(job, world, lambda trainers: Run(job, trainers, begun).run(provenance))
    return Run(job, world, begun).run(provenance)
