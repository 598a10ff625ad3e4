"""`headstart train --plan`: memory, disk space and time of a training, before it is started.

Only the target's config is read (train/planning/target.py); the drafter's step is counted by its
own code without memory (train/planning/dry_run.py). Time is FLOPs over (peak x utilisation): the
utilisation of a finished run, of a few real steps on this machine, or an assumption for a given
GPU. Communication is added from a given GPU's links; the time of `engine.offload` is not counted.
docs/scale.md has the formulas.

The count depends on where the target runs (`Division`, `target_pass`): with features.mode=online in
every process; with group in the last ones, ahead of the others, which train; with store and remote
not in this launch.

Legend: P trained weights, F weights of the drafter that are not trained, W processes that train.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Annotated, Any, NamedTuple, TypedDict, TypeVar

import torch
from annotated_types import Ge, Le

from heads.api.config import Fraction, Repeats, TokenTotal, config
from heads.api.errors import UserError
from heads.api.features import FeatureSpec
from heads.nn import losses
from inference.target.loading import TargetConfig
from train.config import TrainingJob
from train.data.loader import require_dealt
from train.distributed import World
from train.engines.base import EngineConfig
from train.engines.deepspeed import BUCKET_ELEMENTS, LIVE_BUCKETS
from train.features.group import Division, divide
from train.features.store.codec import FORMATS, bytes_per_token, store_bytes
from train.planning.amount import Amount, packed_amount
from train.planning.devices import GIGA, TERA, find_peak, gpu
from train.planning.dry_run import DryStep, dry_step, held_in_parts, plan_drafter
from train.planning.target import PlannedTarget, plan_target
from train.target.parts import refuse_parts
from train.tracking.summary import Summary

ASSUMED_MFU = 0.35
"""Utilisation of GPUs if nothing was measured: an assumption (dense bfloat16 trainings of this size
report 0.3 to 0.5)."""
LINK_SHARE = 0.8
"""Share of a link's bandwidth that collectives reach: an assumption."""
MESSAGE_ELEMENTS = 500_000_000
"""DeepSpeed stage 0: about how many gradient elements are copied into one all-reduce (its own
constant, `MEMORY_OPT_ALLREDUCE_SIZE`)."""
RUNTIME_BYTES = 2 * GIGA
"""Memory of CUDA, NCCL and a fragmented allocator on each GPU: an assumption."""


class PlannedTargetFacts(TypedDict):
    """The target: parameters, those of its layers that a token uses, bytes of its weights, and of
    its cache: per token of a row, per row, and per drafted token while a verification runs."""

    path: str
    parameters: int
    active: int
    bytes: int
    cache: dict[str, int]


class DrafterFacts(TypedDict):
    """The drafter and the number of its trained weights."""

    kind: str
    trained_weights: int


class PlanSettings(TypedDict):
    """Settings that the plan depends on."""

    processes: int
    trainers: int
    engine: dict[str, object]
    features: str
    trainer_target: str
    global_batch: int
    micro_batch: int
    sequence_length: int


class TensorFacts(TypedDict):
    """The largest tensor of a step."""

    bytes: int
    shape: list[int]


class DiskBytes(TypedDict):
    """Bytes on disk; feature_store: by format, if there is a store."""

    states: int
    best: int
    feature_store: dict[str, int]


class StepFlops(TypedDict):
    """FLOPs of one micro-batch."""

    target: float
    drafter: float
    per: str


class TargetPass(TypedDict):
    """Where the target runs, and one pass of it over all tokens."""

    where: str
    flops: float
    device_hours: float


class SpeedFacts(TypedDict):
    """FLOP/s of one process, and the source of the figure."""

    flops: float
    source: str


class Plan(TypedDict):
    """The plan of a training. Values by part (`memory_bytes`, `step_seconds`, ...) have a total."""

    format: int
    target: PlannedTargetFacts
    drafter: DrafterFacts
    settings: PlanSettings
    memory_bytes: dict[str, int]
    memory_capacity: float | None
    target_process_bytes: dict[str, int] | None
    fits: bool | None
    largest_tensor: TensorFacts
    disk_bytes: DiskBytes
    flops: StepFlops
    target_pass: TargetPass
    reading: dict[str, float] | None
    speed: SpeedFacts
    step_seconds: dict[str, float]
    tokens: int
    tokens_source: str
    supervised: float
    steps: int
    hours: float
    device_hours: float
    tokens_per_second: float


@config("plan")
@dataclass(frozen=True)
class PlanConfig:
    """The hardware of a planned training, and the basis of its time estimate."""

    gpu: str = ""
    """Name of a GPU (h100, h200, a100, b200, l40s, ...), for its memory, links and peak; empty:
    time as measured, from `measured` or from a few steps on this machine."""
    count: Annotated[int, Ge(1), Le(1_000_000)] = 1
    """Processes, one per GPU."""
    per_machine: Annotated[int, Ge(1), Le(1_000_000)] = 8
    """GPUs of one machine."""
    network_gbytes: Annotated[float, Ge(0.001), Le(1e6)] = 50.0
    """Bandwidth of one GPU to other machines in GB/s (400 Gbit/s are 50)."""
    mfu: Annotated[float, Ge(0.001), Le(1)] = ASSUMED_MFU
    """Share of the GPU's peak that training reaches (0 to 1); the default is an assumption, see
    docs/scale.md."""
    tokens: TokenTotal = 0
    """Tokens of the answers in one pass; 0: those of the run's packed answers, or if there are none
    an upper bound from `data` and `sampling`."""
    supervised: Fraction = 0.7
    """Share of the tokens that are supervised if no packed answers give it (0 to 1)."""
    measured: str = ""
    """summary.json of a run (or its folder) with the same target and head on the planned hardware,
    whose utilisation replaces `mfu`. With `gpu`, communication is added: give a run of one
    process."""
    steps: Repeats = 3
    """Number of real steps to run on this machine if neither `gpu` nor `measured` is given."""

    def __post_init__(self) -> None:
        if self.gpu:
            gpu(self.gpu)


@dataclass(frozen=True)
class Speed:
    """FLOP/s of one process in training; fixed: share of time for measuring and saving."""

    flops: float
    source: str
    fixed: float = 0.0

    @classmethod
    def of(cls, config: PlanConfig) -> Speed:
        peak = gpu(config.gpu).peak
        basis = "assumed" if config.mfu == ASSUMED_MFU else "given"
        source = f"{config.gpu}: {peak / TERA:g} TFLOP/s x {config.mfu:g} ({basis})"
        return cls(peak * config.mfu, source)

    @classmethod
    def here(cls, device: torch.device, engine: EngineConfig, mfu: float) -> Speed:
        """The speed of this machine if it has no data for real steps."""
        peak = find_peak(device, engine.dtype)
        if not peak.flops:
            raise UserError(f"{peak.source}; or give plan.gpu.")
        return cls(peak.flops * mfu, f"{peak.source} x {mfu:g} (assumed; no answers to train on)")

    @classmethod
    def read(cls, summary: Summary, source: str, planned: str = "") -> Speed:
        """The utilisation of a finished run: of its device's peak, or of a `planned` GPU's."""
        if not summary.mfu:
            raise UserError(
                f"'{source}' has no utilisation to plan with. Give train.peak_tflops for that "
                "run, or plan.gpu."
            )
        peak, aside = summary.peak, summary.seconds
        fixed = (aside["evaluation"] + aside["saving"]) / summary.wall_seconds
        known = gpu(planned).peak if planned else peak.tflops * TERA
        of = f"{planned}: {known / TERA:g} TFLOP/s" if planned else peak.source
        return cls(summary.mfu * known, f"measured: {source} ({summary.mfu:.1%} of {of})", fixed)


def state_bytes(weights: int, engine: EngineConfig, processes: int) -> dict[str, int]:
    """Bytes of training P weights on one process: `weights`, `gradients`, `adam` (both moments;
    Muon's matrices have one), and `working` (the engine's copies and buffers)."""
    whole, part = 4 * weights, -(-4 * weights // processes)
    if engine.name == "torch" or engine.zero_stage == 0:
        most = whole if engine.name == "torch" else 4 * MESSAGE_ELEMENTS
        message = min(whole, most) if processes > 1 else 0
        return {"weights": whole, "gradients": whole, "adam": 2 * whole, "working": message}
    stage, bucket = engine.zero_stage, 4 * min(weights, BUCKET_ELEMENTS)
    gathered = min(whole, LIVE_BUCKETS * bucket) if stage == 3 and processes > 1 else 0
    master = part if engine.offload == "none" else 0
    return {
        "weights": (0 if engine.offload == "all" else part) if stage == 3 else whole,
        "gradients": whole if stage == 1 else part,
        "adam": 2 * master,
        "working": master + bucket + gathered,
    }


def target_bytes(target: PlannedTarget, engine: EngineConfig, processes: int) -> int:
    """Bytes of the frozen target on one process, whole or divided (train/target/sharding.py)."""
    if engine.target_sharding == "none" or processes == 1:
        return target.weight_bytes
    rest = target.weight_bytes - target.layer_bytes
    return rest + -(-target.layer_bytes // processes) + 2 * target.largest_layer


def frozen_bytes(frozen: int, engine: EngineConfig, processes: int) -> int:
    """Bytes of a drafter's F frozen weights on one process, float32 as the trained ones."""
    if engine.name == "torch" or engine.zero_stage < 3:
        return 4 * frozen
    return 0 if engine.offload == "all" else -(-4 * frozen // processes)


class Counted(NamedTuple):
    """The target, what the drafter needs of it, its trained weights and its frozen ones, the
    target's bytes held in parts, and one micro-batch."""

    target: PlannedTarget
    needs: FeatureSpec
    weights: int
    frozen: int
    parts: int
    dry: DryStep


def memory(job: TrainingJob, counted: Counted, trainers: int) -> dict[str, int]:
    """Bytes on a training process at a step's peak, by use."""
    target, needs, weights, frozen, parts, dry = counted
    rows, length = job.config.micro_batch, job.config.sequence_length
    online, whole = job.features.mode == "online", job.features.trainer_target == "whole"
    found = {"target": target_bytes(target, job.engine, trainers) if whole else parts}
    state = state_bytes(weights, job.engine, trainers)
    found |= {f"drafter {name}": count for name, count in state.items()}
    found["drafter frozen weights"] = frozen_bytes(frozen, job.engine, trainers)
    # The target's pass and the drafter's follow each other; both hold the features.
    token_bytes = (len(needs.taps) + 1) * target.info.hidden_size * job.engine.dtype.itemsize
    drafting = rows * length * token_bytes + dry.peak
    running = target.activations(rows, length, needs) if online else 0
    return {**found, "activations": max(drafting, running)}


def bandwidth(config: PlanConfig) -> float:
    """Bytes/s that a ring over all processes carries through each of them."""
    link = gpu(config.gpu).link
    if config.count > config.per_machine:
        link = min(link, config.network_gbytes * GIGA * config.per_machine)
    return link * LINK_SHARE


def step_seconds(
    job: TrainingJob, counted: Counted, config: PlanConfig, speed: Speed
) -> dict[str, float]:
    """Seconds of one step on a training process, by part. With features.mode=group, `target` is the
    time it waits for the target's processes, which work `features.ahead` steps ahead."""
    division, online = division_of(job, config), job.features.mode == "online"
    target, weights, dry = counted.target, counted.weights, counted.dry
    trainers = division.trainers
    micro = job.config.global_batch // (job.config.micro_batch * trainers)
    forward = micro * target.flops(job.config.micro_batch, job.config.sequence_length) / speed.flops
    drafting = micro * dry.flops / speed.flops
    served = forward * -(-trainers // division.targets) if division.targets else 0.0
    waiting = max(0.0, served - drafting) if job.features.ahead else served
    compute = {"target": forward if online else waiting, "drafter": drafting}
    if trainers == 1 or not config.gpu:
        return {**compute, "communication": 0.0}
    carried, share = bandwidth(config), (trainers - 1) / trainers
    reduced = share * sent(job.engine, micro) * 4 * weights / carried
    if online and job.engine.target_sharding != "none":
        # Layers are gathered while others are computed: the longer of both counts.
        gathered = micro * share * target.layer_bytes / carried
        return {**compute, "communication": reduced + max(0.0, gathered - compute["target"])}
    return {**compute, "communication": reduced}


def sent(engine: EngineConfig, micro: int) -> int:
    """How often a step of `micro` micro-batches sends all weights or gradients around the ring. An
    all-reduce counts twice, a reduce-scatter or gathering once."""
    if engine.name == "torch" or engine.zero_stage == 0:
        return 2
    # DeepSpeed reduces by all-reduce in stages 1 and 2, and gathers the updated weights once; from
    # stage 2 on it reduces in every micro-batch, and stage 3 gathers in both passes of each
    return {1: 3, 2: 2 * micro + 1, 3: 3 * micro}[engine.zero_stage]


def division_of(job: TrainingJob, config: PlanConfig) -> Division:
    """Which processes train and which run the target; raises `UserError` for an impossible
    division."""
    if job.features.mode == "group":
        return divide(job, World(size=config.count))
    return Division(config.count, 0)


def target_pass(
    job: TrainingJob, target: PlannedTarget, tokens: int, division: Division, speed: Speed
) -> TargetPass:
    """Where the target runs, and the cost of its pass over all tokens on such devices."""
    where = {
        "online": "in every process; it is in the time",
        "store": "beforehand, once over all tokens, to make the store; that is not in the time",
        "remote": "on feature servers; neither their time nor their memory is counted",
        "vllm": "on vLLM servers; neither their time nor their memory is counted",
        "sglang": "on SGLang servers; neither their time nor their memory is counted",
        "responses": "beforehand, on the servers that generated the responses",
        "group": f"in the last {division.targets} of {division.size} processes, ahead of the "
        f"{division.trainers} that train; the time has what these wait for it",
    }[job.features.mode]
    length = job.config.sequence_length
    flops = -(-tokens // length) * target.flops(1, length)
    return {"where": where, "flops": flops, "device_hours": flops / speed.flops / 3600}


def reading(
    job: TrainingJob, target: PlannedTarget, needs: FeatureSpec, trainers: int, seconds: float
) -> dict[str, float] | None:
    """The load of features on disks or network at `seconds` per step; None if none are read."""
    if job.features.mode == "online":
        return None
    per_token = bytes_per_token(needs, target.info, job.features.format, job.features.top_logits)
    step = per_token * job.config.global_batch * job.config.sequence_length
    return {
        "bytes_per_token": per_token,
        "bytes_per_step": step,
        "process_bytes_per_second": step / seconds / trainers,
        "total_bytes_per_second": step / seconds,
    }


def refuse_unplanned(job: TrainingJob) -> None:
    """Raise `UserError` for trainings of other weights than those of a whole drafter."""
    counts = "the plan counts a training of all weights of the drafter beside a frozen target"
    if job.joint.on:
        raise UserError(
            f"{counts}, but joint={job.joint.mode} also trains updates of the target's layers, "
            "whose gradients, optimiser state and backward pass would be left out. Give joint=none "
            "for the plan of the drafter's part alone, and train without --plan."
        )
    if job.config.refresh.lora_rank:
        raise UserError(
            f"{counts}, but train.refresh.lora_rank={job.config.refresh.lora_rank} trains low-rank "
            "updates of it, which take less memory. Give train.refresh.lora_rank=0 for an upper "
            "bound, and train without --plan."
        )


def make_plan(job: TrainingJob, config: PlanConfig, speed: Speed) -> Plan:
    """The plan as JSON values; raises `UserError` for an undividable batch or unknown tokens."""
    refuse_unplanned(job)
    refuse_parts(job)
    train, division = job.config, division_of(job, config)
    trainers = division.trainers
    require_dealt(train.global_batch, train.micro_batch, trainers)
    amount = known_amount(job, config)
    if amount is None:
        raise UserError(
            f"how much will be trained on is not known: '{job.data}' holds no answers packed to "
            f"{job.config.sequence_length} tokens. Give plan.tokens (and plan.supervised)."
        )
    tokens, supervised = amount.tokens, amount.supervised
    shape, settings = (train.micro_batch, train.sequence_length), (job.target, job.engine)
    chunk = chunk_of(config)
    counted = count_step(job.kind, ByText(job.head), *settings, *shape, round(supervised, 2), chunk)
    target, needs, weights, frozen, _, dry = counted
    held = with_total(memory(job, counted, trainers))
    beside = None
    if division.targets:  # processes that run the target for others
        working = target.activations(*shape, needs)
        beside = with_total({"target": target.weight_bytes, "activations": working})
    largest = max(held["total"], beside["total"] if beside else 0)
    steps = train.steps(-(-tokens // (train.global_batch * train.sequence_length)))
    seconds = with_total(step_seconds(job, counted, config, speed))
    hours = steps * seconds["total"] / (1.0 - speed.fixed) / 3600
    capacity = gpu(config.gpu).memory - RUNTIME_BYTES if config.gpu else None
    rows = -(-tokens // train.sequence_length)
    top = job.features.top_logits
    stores = {fmt: bytes_per_token(needs, target.info, fmt, top) for fmt in FORMATS}
    # the running mean holds the frozen weights too, the moments do not
    trained, still = (16, 8) if train.average else (12, 4)
    return {
        "format": 1,
        "target": {
            "path": job.target.path,
            "parameters": target.info.parameters,
            "active": target.active,
            "cache": asdict(target.cache),
            "bytes": target.weight_bytes,
        },
        "drafter": {"kind": job.kind, "trained_weights": weights},
        "settings": {
            "processes": config.count,
            "trainers": trainers,
            "engine": asdict(job.engine),
            "features": job.features.mode,
            "trainer_target": job.features.trainer_target,
            "global_batch": train.global_batch,
            "micro_batch": train.micro_batch,
            "sequence_length": train.sequence_length,
        },
        "memory_bytes": held,
        "memory_capacity": capacity,
        "target_process_bytes": beside,
        "fits": None if capacity is None else largest <= capacity,
        "largest_tensor": {"bytes": dry.largest, "shape": list(dry.largest_shape)},
        "disk_bytes": {
            "states": (trained * weights + still * frozen) * (train.keep + 1),
            "best": 2 * (weights + frozen) * target.dtype.itemsize,
            "feature_store": {
                fmt: store_bytes(size, tokens, rows, 1, 1) for fmt, size in stores.items()
            },
        },
        "flops": {"target": target.flops(*shape), "drafter": dry.flops, "per": "micro-batch"},
        "target_pass": target_pass(job, target, tokens, division, speed),
        "reading": reading(job, target, needs, trainers, seconds["total"]),
        "speed": {"flops": speed.flops, "source": speed.source},
        "step_seconds": seconds,
        "tokens": tokens,
        "tokens_source": amount.source,
        "supervised": supervised,
        "steps": steps,
        "hours": hours,
        "device_hours": hours * config.count,
        "tokens_per_second": train.global_batch * train.sequence_length / seconds["total"],
    }


Number = TypeVar("Number", int, float)


def with_total(parts: dict[str, Number]) -> dict[str, Number]:
    return {**parts, "total": sum(parts.values())}


class ByText:
    """Settings that are compared by their text, because some hold mappings, which have no hash."""

    def __init__(self, settings: Any) -> None:
        self.settings, self.text = settings, repr(settings)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ByText) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)


@lru_cache(maxsize=32)
def count_step(
    kind: str,
    head: ByText,
    target: TargetConfig,
    engine: EngineConfig,
    rows: int,
    length: int,
    supervised: float,
    chunk: int,
) -> Counted:
    """The counts of one step, with losses in chunks of at most `chunk` elements; cached, because
    plans for several sizes share them."""
    described = plan_target(target)
    drafter = plan_drafter(kind, head.settings, described)
    weights = sum(p.numel() for p in drafter.parameters() if p.requires_grad)
    floats = sum(p.numel() for p in drafter.parameters() if p.is_floating_point())
    parts = held_in_parts(kind, head.settings, described)
    with losses.chunks_of(chunk):
        step = dry_step(drafter, described, engine, rows, length, supervised)
    return Counted(described, drafter.needs, weights, floats - weights, parts, step)


def chunk_of(config: PlanConfig) -> int:
    """Most elements in a chunk of a loss on the planned device; without `gpu`, on this machine."""
    if config.gpu:
        return losses.gpu_chunk_elements(int(gpu(config.gpu).memory))
    return losses.chunk_elements(torch.device("cuda" if torch.cuda.is_available() else "cpu"))


def known_amount(job: TrainingJob, config: PlanConfig) -> Amount | None:
    """Tokens of the answers, as given or as packed; None before anything was packed. With
    train.context_weight, nearly all tokens are supervised."""
    if config.tokens:
        found: Amount | None = Amount(config.tokens, config.supervised, "plan.tokens")
    else:
        found = packed_amount(job.data, job.config.sequence_length, job.config.domains)
    return replace(found, supervised=1.0) if found and job.config.context_weight else found
