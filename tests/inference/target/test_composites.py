"""Checkpoints of models for text and images: their text part is the target, loaded from the whole
checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from heads.api.checkpoint import new_drafter
from heads.eagle3 import Config
from inference.decoding.config import DecodeConfig
from inference.target.loading import TargetConfig
from inference.target.model import TargetModel
from tests.inference.decoding.test_lossless import SHAPES, decode, requests
from tests.inference.target.test_families import check_trees
from tests.inference.tokenizers import tiny_tokenizer
from tests.models import ALL_FAMILIES, COMPOSITE_FAMILIES, RECURRENT_FAMILIES, SMALL
from train.planning.target import plan_target


def save(family: str, folder: Path) -> Any:
    text, seeing = COMPOSITE_FAMILIES[family]
    tokenizer = tiny_tokenizer("chatml")
    own = (ALL_FAMILIES | RECURRENT_FAMILIES)[text]
    sizes = {**SMALL, **own, "vocab_size": len(tokenizer), "model_type": text}
    if "vocab_size_per_layer_input" in sizes:
        sizes["vocab_size_per_layer_input"] = len(tokenizer)
    config = AutoConfig.for_model(family, text_config=sizes, vision_config=seeing)
    torch.manual_seed(3)
    model = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)](config).eval()
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1 and not name.endswith("A_log"):
            parameter.data.normal_(0, 0.25)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model


@pytest.fixture(scope="module", params=COMPOSITE_FAMILIES)
def composite(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Any, TargetModel]:
    family = str(request.param)
    folder = tmp_path_factory.mktemp(family)
    model = save(family, folder)
    # "eager" experts: the grouped product takes no float64
    target = TargetModel.load(TargetConfig(str(folder), dtype="float64", device="cpu"))
    return family, model.double(), target


def test_the_text_part_is_the_target(composite: tuple[str, Any, TargetModel]) -> None:
    family, model, target = composite
    assert target.info.model_type == COMPOSITE_FAMILIES[family][0]
    seeing = [n for n, _ in target.model.named_parameters() if "vision" in n or "visual" in n]
    assert not seeing
    assert target.info.parameters < sum(p.numel() for p in model.parameters())
    assert "model.layers.0.mlp.up_proj.weight" in target.weights.state or family == "llama4"
    vocabulary = target.info.vocab_size
    assert vocabulary > 60
    check_trees(target, model, (5, 1, 12))


@pytest.mark.parametrize("shape", SHAPES)
def test_text_with_drafts_is_the_plain_text(
    composite: tuple[str, Any, TargetModel], shape: str
) -> None:
    _, _, target = composite
    items = requests(4, new=10)
    drafter = new_drafter("eagle3", Config(draft_vocab_size=0), target.info, target.weights, seed=1)
    config = DecodeConfig(batch_size=3, **SHAPES[shape])  # type: ignore[arg-type]
    plain = decode(target, None, DecodeConfig(batch_size=3), items)
    found = decode(target, drafter, config, items)
    assert {i: c.tokens for i, c in found.items()} == {i: c.tokens for i, c in plain.items()}


def test_it_is_planned_without_weights(composite: tuple[str, Any, TargetModel]) -> None:
    family, _, target = composite
    planned = plan_target(TargetConfig(target.info.id, dtype="float32", device="cpu"))
    assert planned.info.model_type == COMPOSITE_FAMILIES[family][0]
    assert planned.info.parameters == target.info.parameters
