"""The drafter in training beside the one that decodes. It has separate float32 weights and uses the
losses, engine and optimisers of `headstart train` on answers in memory."""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from heads.api.batch import TrainBatch
from heads.api.drafter import TrainableDrafter
from heads.api.errors import UserError
from inference.target.model import TargetModel
from train.data.loader import PackedBatch, StepLoader
from train.data.pack import PackedData
from train.data.packed_file import Document
from train.distributed import World
from train.engines.base import EngineConfig
from train.engines.torch_engine import TorchEngine
from train.features.base import Features, OnlineFeatures
from train.on_policy import OnPolicyConfig, OnPolicyFeatures
from train.optim import OptimConfig


@dataclass(frozen=True)
class RefreshSettings:
    """The training of a drafter between rollouts."""

    optim: OptimConfig = field(default_factory=lambda: OptimConfig(kind="muon", lr=1e-3))
    """Optimiser, whose state continues from refresh to refresh; the rate is constant."""
    rows: int = 8
    """Packed rows of a step (at least 1); fewer if the rollouts fill fewer."""
    micro_rows: int = 8
    """Rows of a forward pass (at least 1)."""
    length: int = 0
    """Tokens of a packed row; longer answers are cut. 0: as long as the longest answer."""
    rollouts: int = 1
    """Number of last rollouts that are trained on (at least 1)."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the forward passes; auto: float32 on a CPU, bfloat16 elsewhere."""
    on_policy: OnPolicyConfig = field(default_factory=OnPolicyConfig)
    """Share of the rows that the drafter rewrites (train/on_policy.py); default: none."""
    seed: int = 0
    """Seed of the order of rows and of the losses' random draws."""

    def __post_init__(self) -> None:
        least = {"rows": 1, "micro_rows": 1, "length": 0, "rollouts": 1}
        for name, bound in least.items():
            if getattr(self, name) < bound:
                raise UserError(
                    f"RefreshSettings.{name} is at least {bound}; given: {getattr(self, name)}."
                )


@dataclass(frozen=True)
class Refreshed:
    """The result of a refresh. tau: that of the last rollout before it; loss, last_loss: per
    supervised token at the first and the last step; accuracy: of the first drafted token at the
    last step, if the kind measures it; tokens: read, without padding."""

    steps: int
    seconds: float
    tokens: int
    tau: float
    loss: float
    last_loss: float
    accuracy: float | None = None


class DrafterTraining:
    """A drafter's weights in training. Raises `UserError` for a kind that trains no weights, or for
    one that cannot be trained on-policy if that is configured."""

    def __init__(
        self, drafter: TrainableDrafter, target: TargetModel, settings: RefreshSettings
    ) -> None:
        self.target, self.settings, self.served = target, settings, drafter
        self.drafter = _float32_copy(drafter, target)
        self.steps = 0
        precision = settings.precision
        if precision == "auto":
            precision = "float32" if target.device.type == "cpu" else "bfloat16"
        config = EngineConfig(name="torch", precision=precision)
        self.config = config
        self.engine = self._new_engine()
        plain = OnlineFeatures(target, self.drafter.needs, config.dtype)
        self.features: Features = plain
        if settings.on_policy.share:
            eos, own = target.eos_token_ids, settings.on_policy
            self.features = OnPolicyFeatures(plain, self.drafter, eos, own, config)

    def follow(self) -> None:
        """Continue with the target's new weights."""
        self.drafter.follow(self.target.weights)

    def train(self, documents: Iterable[Document], length: int, steps: int) -> Mapping[str, float]:
        """Train for `steps` steps on the documents, packed into rows of `length`; returns sums and,
        as loss and last_loss, two means. The decoding drafter gets the new weights if all are
        finite. Otherwise raises `UserError`, and both keep the old ones."""
        settings = self.settings
        data = PackedData(documents, length)
        rows = min(settings.rows, len(data))
        most = min(rows, settings.micro_rows)
        micro = next(count for count in range(most, 0, -1) if rows % count == 0)
        # another seed for every refresh, so that the first rows differ between refreshes
        loader = StepLoader(data, rows, micro, 1, 0, settings.seed + self.steps)
        before = {name: value.clone() for name, value in self.drafter.state_dict().items()}
        try:
            found = self._steps(loader, steps)
        except BaseException:
            self._take_back(before)
            raise
        self.publish()
        return found

    def _steps(self, loader: StepLoader, steps: int) -> Mapping[str, float]:
        settings = self.settings
        found: dict[str, float] = defaultdict(float)
        for index in range(steps):
            batches, made, supervised = self._batches(loader, index)
            loss = 0.0
            for place, (packed, batch) in enumerate(zip(batches, made, strict=True)):
                batch.progress = 1.0
                output = self.engine.forward_backward(batch, supervised, place + 1 == len(batches))
                loss += float(output.loss_sum) / supervised
                found["tokens"] += int((packed.segments > 0).sum())
                if index + 1 == steps and "accuracy/depth1" in output.metrics:
                    right, count = map(float, output.metrics["accuracy/depth1"])
                    found["right"] += right
                    found["judged"] += count
            norm = self.engine.step(settings.optim.lr)
            if not math.isfinite(loss) or not math.isfinite(norm):
                raise UserError(
                    f"a refresh ended at step {index + 1}: its loss is {loss}, its gradient's norm "
                    f"{norm}. The drafter keeps its weights. Lower RefreshSettings.optim.lr."
                )
            found["last_loss"] = loss
            if index == 0:
                found["loss"] = loss
            self.steps += 1
        return found

    def _batches(
        self, loader: StepLoader, index: int
    ) -> tuple[list[PackedBatch], Iterable[TrainBatch], int]:
        """A step's micro-batches, the same with features, and the supervised tokens of all (at
        least 1), by which their losses are divided."""
        batches, supervised = loader.step(index), loader.supervised(index)
        made: Iterable[TrainBatch] = (self.features.batch(one, self.steps) for one in batches)
        if isinstance(self.features, OnPolicyFeatures):
            made = list(made)  # how much is supervised is known once all rows are rewritten
            supervised = sum(int(batch.loss_mask.sum()) for batch in made)
        return batches, made, max(1, supervised)

    @torch.no_grad()
    def publish(self) -> None:
        """Copy the weights to the drafter that decodes, in place."""
        own: dict[str, Tensor] = dict(self.served.state_dict())
        for name, value in self.drafter.state_dict().items():
            own[name].copy_(value)

    def state(self) -> dict[str, Any]:
        """The state for `load`: weights in training, the optimiser's state, steps so far. All of it
        is a copy, which later steps leave as it is."""
        state = {
            "drafter": dict(self.drafter.state_dict()),
            "optimizer": self.engine.optimizer.state_dict(),
            "steps": self.steps,
        }
        return copy.deepcopy(state)

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state`, which may be older than the target's weights; the decoding
        drafter gets its weights."""
        self.drafter.load_state_dict(state["drafter"])
        self.follow()
        self.engine.optimizer.load_state_dict(state["optimizer"])
        self.steps = state["steps"]
        self.publish()

    def _new_engine(self) -> TorchEngine:
        world = World(device=self.target.device)
        return TorchEngine(self.drafter, self.config, self.settings.optim, world)

    def _take_back(self, before: Mapping[str, Tensor]) -> None:
        """Return to the weights before the refresh, in float32 (the decoding drafter may have them
        in fewer digits, and gives those that are not finite); the optimiser starts anew."""
        self.drafter.zero_grad(set_to_none=True)
        own = self.served.state_dict()
        whole = {name: bool(value.isfinite().all()) for name, value in before.items()}
        kept = {name: value if whole[name] else own[name] for name, value in before.items()}
        self.drafter.load_state_dict(kept)
        self.engine = self._new_engine()


def _float32_copy(drafter: TrainableDrafter, target: TargetModel) -> TrainableDrafter:
    """A trainable drafter with the same weights, on the target's device."""
    if not drafter.trains:
        raise UserError(
            f"kind '{drafter.kind}' trains no weights of its own, so there is nothing to refresh. "
            "It follows its target as it is."
        )
    kind: Any = type(drafter)
    cuda = [target.device] if target.device.type == "cuda" else []
    with torch.random.fork_rng(cuda):  # weights that are set below
        twin: TrainableDrafter = kind(drafter.config, drafter.info)
    twin.to(device=target.device, dtype=torch.float32)
    twin.load_state_dict(drafter.state_dict())
    twin.bind(target.weights)
    if not any(parameter.requires_grad for parameter in twin.parameters()):
        raise UserError(
            f"kind '{drafter.kind}' has no weights to train: it follows its target as it is."
        )
    return twin
