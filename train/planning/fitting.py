"""Settings with which a planned training would fit, if it does not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from heads.api.errors import UserError
from train.config import TrainingJob
from train.planning.plan import Plan, PlanConfig, Speed, make_plan

MOST_GPUS = 64
SHORTEST_ROW = 1024
Trial = tuple[list[str], TrainingJob, PlanConfig]
"""The change, as on the command line, and the training with it."""


class Fit(NamedTuple):
    """Settings, and the bytes of the largest process with them."""

    settings: str
    size: int


def ways_to_fit(job: TrainingJob, config: PlanConfig, speed: Speed) -> tuple[list[Fit], Fit | None]:
    """Changes of settings with which the training fits the GPU, the smallest of each kind; if there
    are none, the one that comes closest."""
    capacity = float(make_plan(job, config, speed)["memory_capacity"] or 0.0)
    fitting: list[Fit] = []
    closest: Fit | None = None
    for kind in (savings, shorter, more_gpus, apart):
        for words, changed, planned in kind(job, config):
            try:
                plan = make_plan(changed, planned, Speed.of(planned))
            except UserError:  # settings that do not fit together
                continue
            found = Fit(" ".join(words), largest(plan))
            if found.size <= capacity:
                fitting.append(found)
                break
            if closest is None or found.size < closest.size:
                closest = found
    return fitting, None if fitting else closest


def largest(plan: Plan) -> int:
    """Bytes of the process that needs most."""
    beside = plan["target_process_bytes"]
    return max(plan["memory_bytes"]["total"], beside["total"] if beside else 0)


def savings(job: TrainingJob, config: PlanConfig) -> Iterator[Trial]:
    """Changes that save memory without changing the result, each on top of those before it."""
    words: list[str] = []
    if job.config.micro_batch > 1:
        words.append("train.micro_batch=1")
        job = replace(job, config=replace(job.config, micro_batch=1))
        yield words, job, config
    engine = job.engine
    if not engine.activation_checkpointing:
        words = [*words, "engine.activation_checkpointing=true"]
        job = replace(job, engine=replace(engine, activation_checkpointing=True))
        yield words, job, config
    if job.engine.target_sharding == "none" and config.count > 1 and job.features.mode == "online":
        words = [*words, "engine.target_sharding=zero3"]
        job = replace(job, engine=replace(job.engine, target_sharding="zero3"))
        yield words, job, config
    divisible = job.optim.kind == "adamw"  # `refuse_senseless`
    if job.engine.name == "deepspeed" and job.engine.offload == "none" and divisible:
        words = [*words, "engine.zero_stage=3", "engine.offload=optimizer"]
        changed = replace(job.engine, zero_stage=3, offload="optimizer", compile=False)
        yield words, replace(job, engine=changed), config


def smallest(job: TrainingJob, config: PlanConfig) -> Trial:
    """The training with all changes that save memory."""
    return [([], job, config), *savings(job, config)][-1]


def shorter(job: TrainingJob, config: PlanConfig) -> Iterator[Trial]:
    """Shorter rows, on top of all savings."""
    words, small, _ = smallest(job, config)
    length = job.config.sequence_length // 2
    while length >= SHORTEST_ROW:
        changed = replace(small, config=replace(small.config, sequence_length=length))
        yield [*words, f"train.sequence_length={length}"], changed, config
        length //= 2


def more_gpus(job: TrainingJob, config: PlanConfig) -> Iterator[Trial]:
    """More GPUs, over which the target is divided."""
    words, small, _ = smallest(job, replace(config, count=max(2, config.count)))
    count = config.count * 2
    while count <= MOST_GPUS:
        batch = small.config.global_batch
        needed = small.config.micro_batch * count
        changed, more = small, []
        if batch % needed:
            more = [f"train.global_batch={needed}"]
            changed = replace(small, config=replace(small.config, global_batch=needed))
        yield [*words, *more, f"plan.count={count}"], changed, replace(config, count=count)
        count *= 2


def apart(job: TrainingJob, config: PlanConfig) -> Iterator[Trial]:
    """The target outside the training: its states come from a store, and trainers hold only the
    parts of it that the drafter uses."""
    if job.features.mode != "online" or job.joint.on:
        return
    words = ["features=store", "features.trainer_target=parts", "train.eval_every=0"]
    words += ["train.parity=false", "train.micro_batch=1"]
    features = replace(job.features, mode="store", trainer_target="parts")
    train = replace(job.config, micro_batch=1, eval_every=0, parity=False)
    engine = replace(job.engine, target_sharding="none")
    yield words, replace(job, features=features, config=train, engine=engine), config
