"""The interface of training engines, which hold the weights, compute gradients and apply updates.

Precision is the same in all engines: weights, gradients and the optimiser's state are float32;
`bfloat16` runs the forward pass under `torch.autocast`. So an update never rounds to bfloat16, and
engines can be compared number by number.

The gradient is the same in all engines: that of (sum of all losses of the global step) / (its
supervised tokens), whatever the number of processes and of micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from heads.api.batch import LossOutput, TrainBatch
from heads.api.config import config
from heads.api.drafter import TrainableDrafter
from heads.api.errors import UserError
from heads.nn.checkpointing import compiling, recomputing
from train.engines.shards import AnyPart, StatePart

PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@config("engine")
@dataclass(frozen=True)
class EngineConfig:
    """The engine that trains, and its precision."""

    name: Literal["deepspeed", "torch"] = "deepspeed"
    """deepspeed, or torch (plain data parallelism: for debugging, and the reference in tests)."""
    zero_stage: Literal[0, 1, 2, 3] = 1
    """deepspeed: state to divide among the processes. 0 nothing, 1 the optimiser's state, 2 also
    gradients, 3 also weights."""
    precision: Literal["float32", "bfloat16"] = "bfloat16"
    """Precision of the forward passes, including those of a float32 target: bfloat16 (autocast) or
    float32. Weights and the optimiser's state are float32 in both."""
    activation_checkpointing: bool = False
    """Keep only the inputs of the drafter's layers and unrolled steps, and recompute the rest in
    the backward pass: less memory for about a third more time. Nothing else changes."""
    compile: bool = False
    """Compile the drafter's layers and unrolled steps with torch.compile. This takes from half a
    minute up to some minutes at the start, and needs a C++ compiler on a CPU. Not with zero_stage
    3, which loads and frees weights inside a layer."""
    target_sharding: Literal["none", "zero3"] = "none"
    """none: every process holds the whole frozen target. zero3: its layers are divided among the
    processes, and each layer is assembled only while it runs (train/target/sharding.py), for
    targets that do not fit one device."""
    offload: Literal["none", "optimizer", "all"] = "none"
    """deepspeed, zero_stage 1 to 3: `optimizer` keeps AdamW's state and update in CPU memory; `all`
    (zero_stage 3) keeps the weights there too while they are not in use."""
    offload_path: str = ""
    """With offload and zero_stage 3: folder on a local NVMe disk for AdamW's state instead of CPU
    memory. Needs libaio. Each process writes there, and its files do not outlive the training.
    Empty: CPU memory."""

    def __post_init__(self) -> None:
        if self.offload != "none" and (self.name != "deepspeed" or self.zero_stage == 0):
            raise UserError(
                "engine.offload needs engine.name=deepspeed and engine.zero_stage 1, 2 or 3."
            )
        if self.offload == "all" and self.zero_stage != 3:
            raise UserError(
                "engine.offload=all moves weights that are divided, which needs "
                f"engine.zero_stage=3; given: {self.zero_stage}. Use offload=optimizer."
            )
        if self.compile and self.name == "deepspeed" and self.zero_stage == 3:
            raise UserError(
                "engine.compile makes programs of whole layers, but under engine.zero_stage=3 "
                "weights come and go inside of them. Use zero_stage 0, 1 or 2, or compile=false."
            )
        if self.offload_path and (self.offload == "none" or self.zero_stage != 3):
            raise UserError(
                "engine.offload_path needs engine.offload=optimizer or all, and "
                f"engine.zero_stage=3; given: offload {self.offload}, zero_stage "
                f"{self.zero_stage}."
            )

    @property
    def dtype(self) -> torch.dtype:
        return PRECISIONS[self.precision]

    @property
    def sharded(self) -> bool:
        """Whether every process holds a different part of the optimiser's state."""
        return self.name == "deepspeed" and self.zero_stage > 0


class TrainEngine(Protocol):
    """A drafter in training. All methods are collective: every process calls them in one order."""

    sharded: bool
    """Whether `optimizer_state` differs from process to process."""

    def forward_backward(self, batch: TrainBatch, supervised: int, last: bool) -> LossOutput:
        """Add the gradient of one micro-batch; returns its detached loss and metrics. supervised:
        tokens of the WHOLE global step (all processes and micro-batches), the loss's divisor. last:
        whether it is this process's last micro-batch of the step."""

    def step(self, rate: float) -> float:
        """Clip, update, and clear the gradient; returns the norm of the whole one before
        clipping."""

    def weights(self) -> dict[str, Tensor]:
        """The drafter's `state_dict`, float32 on the CPU; empty except in the main process."""

    def optimizer_state(self) -> StatePart:
        """The optimiser's state by weight, this process's part; empty before the first step."""

    def load_optimizer_state(self, parts: Sequence[AnyPart]) -> None:
        """Take over the `optimizer_state` of all processes, of any engine and number."""

    def close(self) -> None:
        """Release the engine's resources; the drafter's unsharded weights stay valid."""


class Objective(nn.Module):
    """A drafter in the configured precision: batch in, loss out. metrics: of the last batch."""

    def __init__(self, drafter: TrainableDrafter, config: EngineConfig, device_type: str) -> None:
        super().__init__()
        self.drafter = drafter
        self.precision, self.device_type = config.precision, device_type
        self.recompute, self.compiled = config.activation_checkpointing, config.compile
        self.metrics: dict[str, tuple[Tensor, Tensor]] = {}

    def autocast(self) -> AbstractContextManager[None]:
        enabled = self.precision == "bfloat16"
        return torch.autocast(self.device_type, torch.bfloat16, enabled=enabled)

    def forward(self, batch: TrainBatch) -> Tensor:
        """The summed loss, a scalar with its graph."""
        with self.autocast(), recomputing(self.recompute), compiling(self.compiled):
            # Not `self.drafter(batch)`: ZeRO-3 can track a module's output only if it consists of
            # tensors.
            output = self.drafter.loss(batch)
        metrics = output.metrics.items()
        self.metrics = {name: (part[0].detach(), part[1].detach()) for name, part in metrics}
        return output.loss_sum


def cpu_copies(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous copies on the CPU that later updates do not change."""
    return {name: value.detach().to("cpu", copy=True).contiguous() for name, value in state.items()}


def fill_gradients(parameters: Iterable[Tensor]) -> None:
    """Give weights that no row used a gradient of zero, so that the update is the same for any
    number of processes."""
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
