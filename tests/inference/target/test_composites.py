"""Checkpoints of models for text and images: their text part is the target, loaded from the whole
checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
)

from heads.api.checkpoint import new_drafter
from heads.eagle3 import Config
from inference.decoding.config import DecodeConfig
from inference.target.loading import TargetConfig
from inference.target.model import TargetModel
from tests.inference.decoding.test_lossless import SHAPES, decode, requests
from tests.inference.target.test_families import check_trees
from tests.inference.tokenizers import tiny_tokenizer
from tests.models import (
    ALL_FAMILIES,
    COMPOSITE_FAMILIES,
    INDEXED_FAMILIES,
    RECURRENT_FAMILIES,
    SIZED_FAMILIES,
    SMALL,
    sized,
)
from train.planning.target import plan_target
from train.target.parts import load_parts


def save(family: str, folder: Path) -> Any:
    text, parts = COMPOSITE_FAMILIES[family]
    tokenizer = tiny_tokenizer("chatml")
    own = (ALL_FAMILIES | RECURRENT_FAMILIES | INDEXED_FAMILIES).get(text)
    own = sized(text) if own is None and text in SIZED_FAMILIES else own or {}
    sizes = {**SMALL, **own, "vocab_size": len(tokenizer), "model_type": text}
    if "index_topk" in sizes:  # all keys: the library leaves the choice among ties open
        sizes["index_topk"] = 64
    if "vocab_size_per_layer_input" in sizes:
        sizes["vocab_size_per_layer_input"] = len(tokenizer)
    config = AutoConfig.for_model(family, text_config=sizes, **parts)
    torch.manual_seed(3)
    seeing = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    classes = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING if seeing else MODEL_FOR_CAUSAL_LM_MAPPING
    model = classes[type(config)](config).eval()
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
    target = TargetModel.load(TargetConfig(str(folder), dtype="float64", device="cpu"))
    model.set_experts_implementation("eager")  # the grouped product takes no float64
    return family, model.double(), target


def test_the_text_part_is_the_target(composite: tuple[str, Any, TargetModel]) -> None:
    family, model, target = composite
    assert target.info.model_type == COMPOSITE_FAMILIES[family][0]
    seeing = [n for n, _ in target.model.named_parameters() if "vision" in n or "visual" in n]
    assert not seeing
    assert target.info.parameters < sum(p.numel() for p in model.parameters())
    assert "model.layers.0.input_layernorm.weight" in target.weights.state
    vocabulary = target.info.vocab_size
    assert vocabulary > 60
    # the library's scans of recurrent layers compute in float32
    share = 2e-5 if COMPOSITE_FAMILIES[family][0] in RECURRENT_FAMILIES else 3e-6
    check_trees(target, model, (5, 1, 12), share=share)


@pytest.mark.rotated
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


def require_parts_of(whole: TargetModel) -> None:
    """The target in parts has the same facts, names and weights, read from the same files."""
    dtype = str(whole.dtype).removeprefix("torch.")
    config = TargetConfig(whole.info.id, dtype=dtype, device="cpu")
    parts = load_parts(config, norm=True)
    assert parts.info == whole.info
    assert torch.equal(parts.weights.embedding, whole.weights.embedding)
    assert torch.equal(parts.weights.lm_head, whole.weights.lm_head)
    assert whole.final_norm is not None and parts.final_norm is not None
    for mine, true in zip(
        parts.final_norm.parameters(), whole.final_norm.parameters(), strict=True
    ):
        assert torch.equal(mine, true)
    assert list(parts.weights.state) == list(whole.weights.state)
    plain = {n: value for n, value in whole.weights.state.items() if ".experts." not in n}
    for name, value in plain.items():
        assert torch.equal(parts.weights.state[name], value), name


def test_it_is_held_in_parts(composite: tuple[str, Any, TargetModel]) -> None:
    require_parts_of(composite[2])


def test_a_family_whose_whole_class_needs_timm_is_read_alone(tmp_path: Path) -> None:
    """gemma3n: the text class takes its weights from the checkpoint of the whole."""
    tokenizer = tiny_tokenizer("chatml")
    words = len(tokenizer)
    own = {**ALL_FAMILIES["gemma3n_text"], "vocab_size_per_layer_input": words}
    sizes = {**SMALL, **own, "vocab_size": words}
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gemma3n_text", **sizes)).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(0, 0.25)
    AutoConfig.for_model("gemma3n", text_config=sizes).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    text = {
        name.replace("model.", "model.language_model.", 1): tensor.contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"
    }
    seeing = {"model.vision_tower.weight": torch.zeros(3)}
    save_file({**text, **seeing}, tmp_path / "model.safetensors", {"format": "pt"})
    target = TargetModel.load(TargetConfig(str(tmp_path), dtype="float64", device="cpu"))
    assert target.info.model_type == "gemma3n_text"
    check_trees(target, model.double(), (5, 1, 12))
    require_parts_of(target)
