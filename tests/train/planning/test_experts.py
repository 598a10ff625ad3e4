"""Targets with experts are planned by their config as they are when loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from heads.api.errors import UserError
from inference.target.loading import TargetConfig
from inference.target.model import TargetModel
from tests.inference.tokenizers import tiny_tokenizer
from tests.models import random_model
from train.planning.target import plan_target

ROUTED = ("dbrx", "gpt_oss", "longcat_flash", "mixtral", "phi4_multimodal", "qwen3_moe")


def save(family: str, folder: Path) -> TargetConfig:
    random_model(family).float().save_pretrained(folder)
    tiny_tokenizer("chatml").save_pretrained(folder)
    return TargetConfig(str(folder), dtype="float32", device="cpu")


@pytest.mark.parametrize("family", ROUTED)
def test_a_plan_counts_what_a_loaded_target_holds(family: str, tmp_path: Path) -> None:
    config = save(family, tmp_path)
    planned, loaded = plan_target(config), TargetModel.load(config)
    assert planned.cache == loaded.cache_sizes()
    assert planned.info.parameters == loaded.info.parameters
    assert planned.dtype == torch.float32


def test_layers_that_compute_by_values_are_named(tmp_path: Path) -> None:
    """Their attention's heads are experts too."""
    with pytest.raises(UserError, match=r"jetmoe.*cannot be planned.*Train without --plan"):
        plan_target(save("jetmoe", tmp_path))
