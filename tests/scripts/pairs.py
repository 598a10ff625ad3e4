"""A micro target, another one of the same sizes, and a drafter that is the first one over again."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from heads.api.checkpoint import build_config, new_drafter, save_drafter
from inference.target.loading import TargetConfig
from inference.target.model import TargetModel
from tests.inference.tokenizers import save_micro_target


def save_pair(folder: Path, change: float) -> None:
    """Write target/, changed/ and drafter/ into `folder`. change: the noise that changes every
    weight, in its standard deviations."""
    save_micro_target(folder / "target")
    save_micro_target(folder / "changed")
    model = AutoModelForCausalLM.from_pretrained(folder / "target")
    torch.manual_seed(5)
    for parameter in model.parameters():
        parameter.data += change * parameter.data.std() * torch.randn_like(parameter)
    model.save_pretrained(folder / "changed")
    config = TargetConfig(path=str(folder / "target"), dtype="float32", device="cpu")
    target = TargetModel.load(config)
    copied = build_config("distilled", {"from_target_layers": [0, 1]})
    drafter = new_drafter("distilled", copied, target.info, target.weights, seed=0)
    save_drafter(drafter, folder / "drafter", target.info)
