"""The optimiser (AdamW or Muon) and the learning rate. The rate is a function of the step, so
resuming needs no scheduler state."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge, Le, Lt
from torch import Tensor, nn

from heads.api.config import Epsilon, Fraction, NonNegativeFloat, Rate, UnitInterval, config
from heads.api.errors import UserError
from heads.nn.matrices import holds_vectors, matrices
from train.muon import MuonAdamW

Beta = Annotated[float, Ge(0), Lt(1)]


@config("optim")
@dataclass(frozen=True)
class OptimConfig:
    """AdamW or Muon (decoupled weight decay) and gradient clipping."""

    kind: Literal["adamw", "muon"] = "adamw"
    """adamw, or muon (train/muon.py): Muon for the matrices between states, AdamW for embeddings,
    LM heads, norms and biases. muon does not work with engine.zero_stage 3 or engine.offload."""
    lr: Rate = 1e-3
    """Peak learning rate (> 0). Medusa heads use 1e-3, EAGLE-3 on an 8B target 5e-5 to 1e-4."""
    momentum: Annotated[float, Ge(0), Lt(1)] = 0.95
    """muon only: decay of the running mean of a matrix's gradient (in [0, 1))."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """Decay of the running mean and of the running square of the gradient (each in [0, 1))."""
    eps: Epsilon = 1e-8
    """Added to the root of the running square (> 0)."""
    weight_decay: Annotated[float, Ge(0), Le(100)] = 0.0
    """Decay of matrices and tables per unit of learning rate (>= 0). Vectors (norms, biases) are
    never decayed, nor are stacks of them."""
    clip: NonNegativeFloat = 1.0
    """Maximum norm of the whole gradient; a longer one is scaled down to it. 0: no clipping."""


@config("schedule")
@dataclass(frozen=True)
class ScheduleConfig:
    """The learning rate over a run of known length."""

    kind: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """cosine, linear, constant, or wsd (warm up, stay, decay in the last part)."""
    warmup: NonNegativeFloat = 0.04
    """Linear warm-up: a share of all steps if below 1, else a number of steps."""
    min_ratio: UnitInterval = 0.1
    """Rate at the last step, as a share of the peak (0 to 1); `constant` ignores it."""
    decay: Fraction = 0.2
    """wsd only: length of the last part, in which the rate falls, as a share of all steps (above 0,
    at most 1)."""
    begin: UnitInterval = 0.0
    """Position in the schedule where this training begins (0 to 1): above 0 for one that continues
    another. Its rate then rises from 0 to the schedule's over the warm-up's share of its own steps,
    since AdamW must rebuild its moments."""
    end: UnitInterval = 1.0
    """Position in the schedule where this training ends (above begin, at most 1)."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.begin < self.end <= 1.0:
            raise UserError(
                "schedule.begin and schedule.end are shares of one schedule, 0 <= begin < end <= "
                f"1; given: {self.begin} and {self.end}."
            )

    def warmup_steps(self, total: int) -> int:
        return round(self.warmup * total) if self.warmup < 1 else int(self.warmup)


def learning_rate(step: int, total: int, peak: float, schedule: ScheduleConfig) -> float:
    """The rate of update `step` (0-based) out of `total`: warm-up to `peak`, then down to `peak *
    min_ratio`, by half a cosine, a straight line, or (wsd) a line over the last `decay` share. A
    part of a schedule (`begin` to `end`) follows the curve of the whole one."""
    if (schedule.begin, schedule.end) != (0.0, 1.0):
        whole = round(total / (schedule.end - schedule.begin))
        place = round(schedule.begin * whole) + step
        rate = learning_rate(place, whole, peak, replace(schedule, begin=0.0, end=1.0))
        climb = schedule.warmup_steps(total) if schedule.begin else 0
        return rate * min(1.0, (step + 1) / climb) if climb else rate
    warmup = schedule.warmup_steps(total)
    if step < warmup:
        return peak * (step + 1) / warmup
    if schedule.kind == "constant":
        return peak
    falling = max(1, round(schedule.decay * total))
    begin = max(warmup, total - falling) if schedule.kind == "wsd" else warmup
    progress = min(1.0, max(0.0, (step - begin) / max(1, total - 1 - begin)))
    shape = 0.5 * (1 + math.cos(math.pi * progress)) if schedule.kind == "cosine" else 1 - progress
    return peak * (schedule.min_ratio + (1 - schedule.min_ratio) * shape)


def set_rate_scale(parameter: Tensor, scale: float) -> None:
    """Set a weight's learning rate to `scale` times that of the others."""
    vars(parameter)["rate_scale"] = scale


def parameter_groups(module: nn.Module, config: OptimConfig) -> list[dict[str, Any]]:
    """The optimiser's groups of trained weights. For every scale of `set_rate_scale`, in order of
    first appearance: the weights for Muon, other weights that are no vectors (both with weight
    decay), and vectors (without)."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    turned = {id(p) for p in matrices(module)} if config.kind == "muon" else set()
    groups: list[dict[str, Any]] = []
    for scale in dict.fromkeys(vars(p).get("rate_scale", 1.0) for p in trained):
        alike = [p for p in trained if vars(p).get("rate_scale", 1.0) == scale]
        rest = [p for p in alike if id(p) not in turned]
        decay = config.weight_decay
        found = [
            {"params": [p for p in alike if id(p) in turned], "weight_decay": decay, "muon": True},
            {"params": [p for p in rest if not holds_vectors(p)], "weight_decay": decay},
            {"params": [p for p in rest if holds_vectors(p)], "weight_decay": 0.0},
        ]
        groups += [{**group, "rate_scale": scale} for group in found if group["params"]]
    return groups


def make_optimizer(module: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    """The optimiser of a module's float32 weights (AdamW fused: one pass over memory); raises
    `UserError` if there are no trainable ones."""
    groups = parameter_groups(module, config)
    if not groups:
        raise UserError(
            "this drafter has no trainable weights. Choose another head, or train some of its "
            "weights."
        )
    if config.kind == "muon":
        return MuonAdamW(groups, config.lr, config.momentum, config.betas, config.eps)
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Use `rate`, times the group's own scale, in the next update."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("rate_scale", 1.0)
