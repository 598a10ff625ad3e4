"""Builds the configured training engine."""

from __future__ import annotations

import warnings

import torch

from heads.api.drafter import TrainableDrafter
from train.distributed import World
from train.engines.base import EngineConfig, TrainEngine
from train.engines.deepspeed import DeepSpeedEngine
from train.engines.torch_engine import TorchEngine
from train.optim import OptimConfig


def make_engine(
    drafter: TrainableDrafter, config: EngineConfig, optim: OptimConfig, world: World
) -> TrainEngine:
    """The engine around `drafter`: float32 weights on its device, equal in every process."""
    wrong = [name for name, p in drafter.named_parameters() if p.dtype != torch.float32]
    assert not wrong, f"weights {wrong[:4]} are not float32"
    # RMSNorm of bfloat16 states with float32 weights is intended; torch warns that it is not its
    # fastest path.
    warnings.filterwarnings("ignore", message="Mismatch dtype between input and weight")
    if config.name == "torch":
        return TorchEngine(drafter, config, optim, world)
    return DeepSpeedEngine(drafter, config, optim, world)
