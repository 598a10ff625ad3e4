"""`train(..., joint=...)` trains a drafter and its target together, and writes both.

    <out>/best/            the drafter, bound to the NEW target; updates.safetensors: its updates
    <out>/target/          the new target: a Hugging Face folder that states its drift
    <out>/manifest.json    names both targets and the drift

tau is measured on the target as it would be saved at that moment: merged, in its own dtype. Until
the training is complete, the drafter in best/ belongs to a target that is not on disk yet, and no
other target accepts it.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from heads.api.checkpoint import WEIGHTS_FILE, save_drafter
from heads.api.drafter import TrainableDrafter
from heads.api.errors import UserError
from heads.api.target_info import TargetInfo
from heads.api.tensors import read_tensors, write_tensors
from inference.measure.drift import measure_drift
from inference.target.loading import describe
from inference.target.model import TargetModel
from train.config import EVAL_BATCH, TrainingJob
from train.distributed import World
from train.features.base import Features
from train.joint.backbone import Backbone
from train.joint.objective import JointDrafter, PlainTokens, require_trainable_features, split_state
from train.joint.target import label, plain, save_changed_target
from train.loop import Evaluation, Progress
from train.manifest import JointFacts, TrainOutcome
from train.setup import BEST, Run
from train.tracking.display import Display

TARGET, UPDATES_FILE = "target", "updates.safetensors"
UNFINISHED = "unfinished joint training"
"""The revision to which a drafter is bound until its target is saved."""


def refuse_combinations(job: TrainingJob) -> None:
    """Raise `UserError` for settings that cannot be combined with joint training."""
    if job.engine.name == "deepspeed" and job.engine.zero_stage == 3:
        raise UserError(
            "joint training with engine.zero_stage=3 is not supported: it would divide the "
            "updates inside the target, which runs outside of the engine. Use zero_stage 0, 1 or "
            "2, or engine=torch."
        )
    if job.config.on_policy.share > 0:
        raise UserError(
            "train.on_policy continues answers with a drafter of a fixed target; set "
            "train.on_policy.share=0 or joint=none."
        )
    if job.config.average:
        raise UserError(
            "train.average keeps the mean of former weights, but a drafter of joint training is "
            "measured on the target as it is now; set train.average=0."
        )
    if job.config.refresh.lora_rank > 0:
        raise UserError(
            "train.refresh.lora_rank keeps most of the drafter still while joint training moves "
            "its target away; set it to 0."
        )
    if not job.config.prompts:
        raise UserError(
            "joint training makes a new target, whose drift from the original is measured on "
            "held-out prompts: give them with train.prompts."
        )


class JointRun(Run):
    """A `Run` whose trained module holds a drafter and its target's updates."""

    drafter: JointDrafter

    def __init__(self, job: TrainingJob, world: World, begun: float | None = None) -> None:
        refuse_combinations(job)
        super().__init__(job, world, begun)
        require_trainable_features(self.drafter)
        self.original = self.target.info
        self.backbone = Backbone(self.target, job.joint, job.config.seed)
        self.drafter = JointDrafter(self.drafter, self.backbone, job.joint, job.engine.dtype)

    @property
    def alone(self) -> TrainableDrafter:
        """See `Run`; its target is not part of it."""
        return self.drafter.drafter

    def features(self) -> Features:
        """Only tokens, because the features are part of what is trained."""
        return PlainTokens(self.target.device)

    def as_saved(self, weights: Mapping[str, Tensor]) -> AbstractContextManager[None]:
        """The target with these weights' updates merged for as long as the context lasts."""
        present = {name: value.detach() for name, value in self.backbone.parameters.items()}
        _, updates = split_state(dict(weights))
        same = all((value == present[name].to(value)).all() for name, value in updates.items())
        assert same, "only the present updates can be measured"
        return self.backbone.merged()

    def serving(self, weights: Mapping[str, Tensor]) -> TrainableDrafter:
        """See `Run`; call it while the target is as it will be saved."""
        own, _ = split_state(dict(weights))
        return self.fresh(type(self.drafter.drafter), own)

    def evaluate(self, weights: dict[str, Tensor]) -> Evaluation:
        """tau of the drafter with the target as it would be saved now."""
        with self.as_saved(weights):
            return super().evaluate(weights)

    def check(self, weights: dict[str, Tensor], display: Display) -> None:
        """See `Run`; on the target as it would be saved now."""
        with self.as_saved(weights) if self.world.is_main else nullcontext():
            super().check(weights, display)

    def write_checkpoint(self, weights: dict[str, Tensor], folder: Path) -> None:
        """Write the drafter, bound to a target that does not exist yet, and its updates."""
        promised = replace(self.original, id=str(self.job.out / TARGET), revision=UNFINISHED)
        with self.as_saved(weights):
            save_drafter(self.serving(weights), folder, promised)
        write_tensors(split_state(weights)[1], folder / UPDATES_FILE)

    def manifest(self, progress: Progress, reason: str) -> TrainOutcome:
        """Save the best target, bind its drafter to it and measure the drift."""
        folder = self.job.out / TARGET
        self.backbone.load(read_tensors(self.job.out / BEST / UPDATES_FILE))
        self.backbone.merge()
        self.backbone.strip()
        save_changed_target(self.target, folder)
        config = replace(self.job.target, path=str(folder), revision=None)
        info = describe(self.target.model, self.target.tokenizer, config)
        self.rebind(info)
        self.target.model.to("cpu")  # make room for the two that are compared
        original, changed = TargetModel.load(self.job.target), TargetModel.load(config)
        requests = self.requests or self.make_requests()
        drift = measure_drift(original, changed, requests, self.eval_rows, EVAL_BATCH)
        label(folder, self.original, self.job.kind, self.job.joint, drift)
        joint: JointFacts = {
            "settings": plain(self.job.joint),
            "original": self.original.to_dict(),
            "target": TARGET,
            "drift": drift.to_dict(),
        }
        return {**super().manifest(progress, reason), "target": info.to_dict(), "joint": joint}

    def rebind(self, info: TargetInfo) -> None:
        """Write the drafter of best/ once more, for the target that is now on disk."""
        best = self.job.out / BEST
        weights = read_tensors(best / WEIGHTS_FILE)
        save_drafter(self.fresh(type(self.drafter.drafter), weights), best, info)
