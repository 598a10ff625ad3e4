"""The settings of a training, checks that they fit together, and the facts that identify it when it
continues."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge, Le, Lt

from heads.api.config import (
    Count,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    Repeats,
    Rows,
    Seconds,
    Seed,
    Tokens,
    UnitInterval,
    config,
)
from heads.api.errors import UserError
from heads.api.registry import get_kind
from heads.api.target_info import TargetInfo
from inference.decoding.config import DecodeConfig
from inference.manifest import MANIFEST_FILE, checkpoint_hash, file_sha256
from inference.target.loading import TargetConfig
from train.data.answers import held_out_prompts
from train.engines.base import EngineConfig
from train.features.config import FeaturesConfig
from train.joint.config import JointConfig
from train.manifest import RunFacts
from train.on_policy import OnPolicyConfig
from train.optim import OptimConfig, ScheduleConfig
from train.refresh import RefreshConfig
from train.state import Snapshot
from train.tracking.tracker import TrackerConfig

logger = logging.getLogger(__name__)

EVAL_BATCH = "train.eval_batch"
"""The name of the setting that gives the rows of a measurement."""
MUST_MATCH = ("kind", "head", "target", "precision", "joint", "base")
"""Facts of a run that a saved state cannot do without; the others are warned about when they
differ."""


@config("train")
@dataclass(frozen=True)
class TrainConfig:
    """The length, the batches, the measurements and the saved states of a training."""

    max_steps: NonNegativeInt = 0
    """Number of updates; 0: as many as `epochs` take."""
    epochs: Annotated[float, Ge(0), Le(1_000_000)] = 1.0
    """Passes over the data when max_steps is 0 (a fraction is allowed)."""
    global_batch: Annotated[int, Ge(1), Le(1_048_576)] = 16
    """Rows per update over all processes."""
    micro_batch: Rows = 4
    """Rows per forward pass of one process; global_batch must be a multiple of micro_batch x
    processes."""
    sequence_length: Annotated[int, Ge(2), Le(1_048_576)] = 512
    """Tokens per row; answers are packed into rows."""
    eval_every: NonNegativeInt = 100
    """Steps between measurements of tau, with another one at the end. 0: never; the last weights
    then count as the best."""
    domains: tuple[str, ...] = ()
    """Domains of the answers that are trained on, and of the prompts that tau is measured on, such
    as [code]; empty: all."""
    context_weight: UnitInterval = 0.0
    """Weight of the loss at tokens outside answers (0 to 1): prompts, and answers that the target
    did not give. 0: only answers are trained on."""
    prompts: tuple[str, ...] = ()
    """Held-out prompts for measuring tau: .jsonl files or folders of them. Empty: those that
    `generate` held out of the answers' data (data.reserve.validation)."""
    eval_prompts: PositiveInt = 24
    """Most prompts of a measurement: the same number of every domain."""
    eval_tokens: Tokens = 64
    """Maximum number of new tokens per prompt in a measurement."""
    eval_batch: Rows = 8
    """Prompts decoded together in a measurement (tau does not depend on it)."""
    patience: Count = 0
    """Stop after this many measurements in a row without a higher tau; 0: never."""
    goal: NonNegativeFloat = 0.0
    """Stop once a measurement's tau reaches this; 0: never."""
    save_every: NonNegativeInt = 100
    """Steps between saved states, with another one at the end. 0: only at the end."""
    keep: Repeats = 2
    """Number of saved states to keep (at least 1)."""
    average: Annotated[float, Ge(0), Lt(1)] = 0.0
    """Decay per step of a running mean of the weights, which is measured and kept in place of the
    last ones, such as 0.99; 0: no mean. See train/averaging.py."""
    average_every: PositiveInt = 10
    """Steps between the weights that enter the mean."""
    max_seconds: Seconds = 0.0
    """End once the steps have taken this many seconds, including earlier sessions; 0: no limit. The
    result then depends on the machine's speed: prefer max_steps."""
    peak_tflops: NonNegativeFloat = 0.0
    """Peak of one device in 10^12 FLOP/s of this precision, for the utilisation; 0: known GPUs by
    name; a CPU is measured by a short matrix product, at the start and again at the end."""
    parity: bool = True
    """Compare the training path with the decoding path before the first step and after the last."""
    seed: Seed = 0
    """Seed of the drafter's initial weights, of the order of rows and of all other random
    choices."""
    on_policy: OnPolicyConfig = field(default_factory=OnPolicyConfig)
    """Training on text that the drafter writes."""
    refresh: RefreshConfig = field(default_factory=RefreshConfig)
    """Starting from an existing drafter."""
    tracker: TrackerConfig = field(default_factory=TrackerConfig)
    """Trackers besides log.jsonl: Weights & Biases, TensorBoard, Trackio, MLflow."""

    def __post_init__(self) -> None:
        if not self.max_steps and self.epochs <= 0:
            raise UserError(
                f"train.epochs must be above 0 when train.max_steps is 0; given: {self.epochs}."
            )
        if self.context_weight and self.on_policy.share:
            raise UserError(
                f"train.context_weight={self.context_weight:g} supervises prompts too, and "
                f"train.on_policy.share={self.on_policy.share:g} would let the drafter continue "
                "those in place of answers. Set one of the two to 0."
            )

    def steps(self, per_epoch: int) -> int:
        """The total number of updates, if one pass over the data takes `per_epoch`."""
        return self.max_steps or max(1, round(self.epochs * per_epoch))


@dataclass(frozen=True)
class TrainingJob:
    """All settings of one training."""

    kind: str
    head: Any
    target: TargetConfig
    data: Path
    out: Path
    config: TrainConfig
    features: FeaturesConfig
    engine: EngineConfig
    optim: OptimConfig
    schedule: ScheduleConfig
    decode: DecodeConfig
    joint: JointConfig = field(default_factory=JointConfig)


def with_prompts(job: TrainingJob) -> TrainingJob:
    """The job with the prompts that tau is measured on: its own, or those that were held out of
    the answers' data. Raises `UserError` if there are none and tau is to be measured."""
    if job.config.prompts:
        return job
    found = held_out_prompts(job.data, "validation")
    if found is not None:
        return replace(job, config=replace(job.config, prompts=(str(found),)))
    if job.config.eval_every:
        raise UserError(
            f"train.prompts is empty and '{job.data}' has no prompts that were held out of its "
            "data (data.reserve.validation), so tau cannot be measured. Give held-out prompts (a "
            ".jsonl file or a folder), or set train.eval_every=0 to keep the last weights "
            "unmeasured."
        )
    return job


def refuse_senseless(job: TrainingJob) -> None:
    """Raise `UserError` for settings that do not fit together."""
    kind, mode = get_kind(job.kind), job.features.mode
    if not kind.trainable or (not job.joint.on and not kind.needs_training(job.head)):
        raise UserError(
            f"a drafter of kind '{job.kind}' with these settings has no weights of its own, so "
            "there is nothing to train. Measure it as it is: `headstart measure` with "
            "measure.kinds or measure.heads."
        )
    if job.config.eval_every and job.decode.shape == "none":
        raise UserError(
            "decode.shape is 'none', so nothing is drafted and tau means nothing. Use "
            "decode=chain or decode=tree."
        )
    stage, offload = job.engine.zero_stage, job.engine.offload
    if (
        job.optim.kind == "muon"
        and job.engine.name == "deepspeed"
        and (stage == 3 or offload != "none")
    ):
        raise UserError(
            "optim.kind=muon multiplies whole matrices on the device, but engine.zero_stage 3 "
            "divides every matrix and engine.offload moves them to the CPU; given: "
            f"zero_stage {stage}, offload {offload}. Use engine.zero_stage 0, 1 or 2 and "
            "engine.offload=none, or optim.kind=adamw."
        )
    if job.joint.on and mode != "online":
        raise UserError(
            "joint training changes the target, so that its features cannot come from elsewhere; "
            f"features.mode is {mode}. Use features=online."
        )


def run_facts(job: TrainingJob, target: TargetInfo, steps: int) -> RunFacts:
    """The facts that identify a run: stored with every state and compared when it continues. Plain
    JSON values."""
    config, answers = job.config, job.data / MANIFEST_FILE
    start = asdict(config.refresh)
    if not config.refresh.adapter:
        del start["adapter"]  # states of earlier versions do not have it
    refresh = {"refresh": start} if config.refresh.init_from else {}
    names = ("global_batch", "sequence_length", "seed")
    train = {name: getattr(config, name) for name in names}
    if config.domains:
        train["domains"] = sorted(config.domains)
    if config.context_weight:
        train["context_weight"] = config.context_weight
    if config.average:
        train |= {"average": config.average, "average_every": config.average_every}
    revision = {"revision": target.revision, "tokenizer_hash": target.tokenizer_hash}
    facts = {
        "kind": job.kind,
        "head": asdict(job.head) | refresh,
        "target": revision | job.target.unusual,
        "engine": asdict(job.engine),
        "precision": job.engine.precision,
        "data": file_sha256(answers) if answers.is_file() else "",
        "optim": asdict(job.optim),
        "schedule": asdict(job.schedule),
        "train": train | {"steps": steps, "on_policy": asdict(config.on_policy)},
    }
    if config.refresh.init_from:
        facts["base"] = checkpoint_hash(config.refresh.init_from)
    if reference := getattr(job.head, "reference", ""):
        facts["reference"] = checkpoint_hash(reference)
    if job.joint.on:
        facts["joint"] = asdict(job.joint)
    plain: RunFacts = json.loads(json.dumps(facts))
    return plain


def require_same(snapshot: Snapshot, facts: RunFacts) -> None:
    """Raise `UserError` for a state of another training; warn of other settings that changed."""
    earlier, own = dict(snapshot.run), dict(facts)
    if "base" in earlier:  # the start is the same wherever it lies
        earlier["head"], own["head"] = map(_without_start, (snapshot.run, facts))
    else:  # states of earlier versions name it by its path alone
        own.pop("base", None)
    names = dict.fromkeys([*own, *MUST_MATCH])
    pairs = {name: (earlier.get(name), own.get(name)) for name in names}
    changed = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    refused = [
        f"{name} was {changed[name][0]}, is {changed[name][1]}"
        for name in changed
        if name in MUST_MATCH
    ]
    # states of earlier versions were all trained with AdamW
    before, now = (run.get("optim", {}).get("kind", "adamw") for run in (snapshot.run, facts))
    if before != now:
        refused.append(f"optim.kind was {before}, is {now}")
    if refused:
        raise UserError(
            f"'{snapshot.directory}' is the state of another training: {'; '.join(refused)}. "
            "Continue with the settings it was started with, or train in another folder."
        )
    for name, pair in changed.items():
        logger.warning("continuing although '%s' has changed: it was %s, is %s", name, *pair)


def _without_start(facts: RunFacts) -> dict[str, Any]:
    """A run's `head` without the path of the checkpoint that it starts from."""
    head: dict[str, Any] = facts.get("head", {})
    refresh = {**head.get("refresh", {}), "init_from": ""}
    return {**head, "refresh": refresh}
