"""Targets with experts or unusual attention are planned by their config as they run when loaded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from heads.api.errors import UserError
from heads.api.features import FeatureSpec
from inference.target.loading import TargetConfig
from inference.target.model import TargetModel
from tests.inference.tokenizers import tiny_tokenizer
from tests.models import (
    ALL_FAMILIES,
    INDEXED_FAMILIES,
    SIZED_FAMILIES,
    VOCAB,
    random_model,
    random_target,
)
from train.planning.footprint import FlopCount
from train.planning.target import PlannedTarget, plan_target

ROUTED = (
    "aria_text",
    "dbrx",
    "gpt_oss",
    "longcat_flash",
    "mixtral",
    "phi4_multimodal",
    "qwen3_moe",
)


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


GEMMA4 = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2}
GEMMA4 |= {"moe_intermediate_size": 16}
CASES: list[tuple[str, dict[str, Any]]] = [
    *((family, {}) for family in sorted({*ALL_FAMILIES, *SIZED_FAMILIES, *INDEXED_FAMILIES})),
    ("gemma4_text", GEMMA4),
]
CASES.remove(("jetmoe", {}))  # is not planned, see below


def planned_by_config(model: Any, folder: Path) -> PlannedTarget:
    model.config.save_pretrained(folder)
    return plan_target(TargetConfig(str(folder), dtype="float32", device="cpu"))


@pytest.mark.rotated
@pytest.mark.parametrize(("family", "settings"), CASES)
def test_a_plan_counts_the_operations_of_a_pass(
    family: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    """Every attention, whatever its widths, indexers, and the experts that run."""
    target = random_target(family, dtype=torch.float32, **settings)
    tokens = torch.randint(3, VOCAB, (2, 12))
    positions, needs = torch.arange(12).expand(2, -1), FeatureSpec(last_hidden=True)
    with FlopCount() as took:
        target.features(tokens, positions, torch.ones_like(tokens), needs)
    # the zero experts of longcat_flash compute nothing, but a token may choose others alone
    within = 0.9 if family == "longcat_flash" else 1.0
    planned = planned_by_config(target.model, tmp_path)
    assert within * planned.flops(2, 12) <= took.flops <= planned.flops(2, 12)


@pytest.mark.parametrize(
    ("family", "settings", "chosen", "width"),
    [
        ("gemma4_text", GEMMA4, 2, 16),
        ("dbrx", {}, 2, 16),
        ("aria_text", {}, 2, 64),
        ("llama4_text", {}, 4, 64),  # all experts run on every token
    ],
)
def test_experts_count_as_they_run(
    family: str, settings: dict[str, Any], chosen: int, width: int, tmp_path: Path
) -> None:
    """Under whatever name the config has their number."""
    planned = planned_by_config(random_model(family, **settings), tmp_path)
    assert planned.experts == chosen * (planned.info.hidden_size + 4 * width)


def test_activations_hold_the_widths_of_latent_attention(tmp_path: Path) -> None:
    planned = planned_by_config(random_model("minicpm3"), tmp_path)
    heads, key, value, hidden, width = 4, 8 + 8, 12, 32, 64
    wide, mlp = 2 * heads * (key + value) + 2 * hidden, hidden + 3 * width
    none = replace(planned, pairs=0)  # as wide as `head_dim`: less than the MLP
    taken = [each.activations(2, 50, FeatureSpec()) for each in (planned, none)]
    assert taken[0] - taken[1] == 2 * 50 * 4 * (wide - mlp)


def test_layers_that_compute_by_values_are_named(tmp_path: Path) -> None:
    """Their attention's heads are experts too."""
    with pytest.raises(UserError, match=r"jetmoe.*cannot be planned.*Train without --plan"):
        plan_target(save("jetmoe", tmp_path))
