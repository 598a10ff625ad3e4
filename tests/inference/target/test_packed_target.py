"""Targets with quantised files: the model has the dequantised numbers, features and training run,
and what is more than weights is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from heads.api.checkpoint import new_drafter
from heads.api.errors import UserError
from heads.api.registry import get_kind
from inference.export.quantised import SCHEMES
from inference.target.loading import TargetConfig
from inference.target.model import TargetModel
from inference.target.packed_weights import dequantise, quantise
from tests.inference.export.ground import save_target
from train.data.loader import PackedBatch
from train.features.base import OnlineFeatures

WEIGHTS = "model.safetensors"


def mxfp8(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """The tensors of a weight [O, I] in MXFP8, and its plain numbers."""
    groups = weight.view(len(weight), -1, 32)
    power = torch.ceil(torch.log2(groups.abs().amax(2, keepdim=True) / 448))
    codes = (groups / torch.exp2(power)).to(torch.float8_e4m3fn)
    scale = (power + 127).squeeze(2).to(torch.uint8)
    parts = {"weight": codes.view(weight.shape), "weight_scale": scale}
    return parts, (codes.float() * torch.exp2(power)).view(weight.shape)


def quantised_target(folder: Path, form: str) -> dict[str, Tensor]:
    """Replace a target's linear layers by quantised ones; returns their plain numbers."""
    tensors, plain = load_file(folder / WEIGHTS), {}
    config = json.loads((folder / "config.json").read_text())
    name = {"modelopt_fp4": "nvfp4", "modelopt_fp8": "fp8"}.get(form, form)
    for full in [each for each in tensors if each.endswith("_proj.weight")]:
        if "mxfp8" in form:
            parts, plain[full] = mxfp8(tensors.pop(full))
        else:
            parts = quantise(tensors.pop(full), name)
            plain[full] = dequantise(parts, torch.float32)
        layer = full.removesuffix("weight")
        if form == "modelopt_fp4":
            parts = {
                "weight": parts["weight_packed"],
                "weight_scale": parts["weight_scale"],
                "weight_scale_2": (1 / parts["weight_global_scale"]).reshape(()),
                "input_scale": torch.tensor(0.1),
            }
        if form == "modelopt_fp8":
            parts["weight_scale"] = parts["weight_scale"].flatten()
        tensors |= {f"{layer}{end}": value for end, value in parts.items()}
    tensors["model.layers.0.self_attn.k_scale"] = torch.tensor(1.0)
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    if form == "modelopt_fp4":  # older versions say it in a file of its own
        content = {"quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"}}
        (folder / "hf_quant_config.json").write_text(json.dumps(content))
    elif form.startswith("modelopt"):
        named = {"quant_method": "modelopt", "quant_algo": form.removeprefix("modelopt_").upper()}
        config["quantization_config"] = named
    elif form == "mxfp8":
        named = {"quant_method": "compressed-tensors", "format": "mxfp8-quantized"}
        config["quantization_config"] = named
    else:
        layout, weights, inputs = SCHEMES[form]
        group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
        config["quantization_config"] = {
            "quant_method": "compressed-tensors",
            "format": layout,
            "config_groups": {"group_0": group},
            "ignore": ["lm_head"],
        }
    (folder / "config.json").write_text(json.dumps(config))
    return plain


def loaded(folder: Path, **options: Any) -> TargetModel:
    return TargetModel.load(TargetConfig(str(folder), device="cpu", **options))


@pytest.mark.parametrize(
    "form", ["int8", "fp8", "nvfp4", "mxfp8", "modelopt_fp4", "modelopt_fp8", "modelopt_mxfp8"]
)
def test_the_model_has_the_dequantised_numbers(tmp_path: Path, form: str) -> None:
    folder = save_target(tmp_path / "target", intermediate_size=64)
    before = load_file(folder / WEIGHTS)
    plain = quantised_target(folder, form)
    target = loaded(folder, dtype="float32")
    state = dict(target.model.state_dict())
    assert len(plain) == 7 * 6
    for name, value in state.items():
        wanted = plain.get(name, before.get(name))
        assert wanted is not None and torch.allclose(value, wanted, rtol=1e-6, atol=0), name
    assert not torch.equal(plain[next(iter(plain))], before[next(iter(plain))])
    assert target.info.parameters == sum(value.numel() for value in before.values())
    half = loaded(folder, dtype="bfloat16")
    assert {value.dtype for value in half.model.state_dict().values()} == {torch.bfloat16}


def test_features_and_training_run(tmp_path: Path) -> None:
    folder = save_target(tmp_path / "target")
    quantised_target(folder, "nvfp4")
    target = loaded(folder, dtype="float32")
    config = get_kind("eagle3").config_class(taps=(1, 3, 4))
    drafter = new_drafter("eagle3", config, target.info, target.weights, seed=1)
    tokens = torch.arange(2 * 24).view(2, 24) % 50
    rows = torch.ones(2, 24, dtype=torch.int32)
    packed = PackedBatch(tokens, torch.arange(24).expand(2, -1), rows, rows > 0, torch.arange(2))
    batch = OnlineFeatures(target, drafter.needs).batch(packed)
    optimiser = torch.optim.AdamW(
        (weight for weight in drafter.parameters() if weight.requires_grad), lr=1e-2
    )
    losses = []
    for _ in range(5):
        optimiser.zero_grad()
        loss = drafter.loss(batch).loss_sum
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse weights"),
        ({"transform_config": {"config_groups": {"R1": {}}}}, "rotated activations"),
        ({"format": "mxfp6-pack-quantized"}, "quantised as mxfp6-pack-quantized"),
    ],
)
def test_more_than_weights_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    folder = save_target(tmp_path / "target")
    quantised_target(folder, "int8")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= change
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=message):
        loaded(folder)


def test_damaged_files_and_contradictions_are_refused(tmp_path: Path) -> None:
    folder = save_target(tmp_path / "target")
    quantised_target(folder, "int8")
    with pytest.raises(UserError, match="quantised already"):
        loaded(folder, quantization="torchao-int8")
    tensors = load_file(folder / WEIGHTS)
    name = "model.layers.3.mlp.up_proj.weight_scale"
    save_file({**tensors, name: tensors[name][:-1].clone()}, folder / WEIGHTS, {"format": "pt"})
    with pytest.raises(UserError, match="do not fit"):
        loaded(folder)
    scaled = {**tensors, "model.layers.0.mlp.up_proj.pre_quant_scale": torch.ones(4)}
    save_file(scaled, folder / WEIGHTS, {"format": "pt"})
    with pytest.raises(UserError, match="changes the inputs"):
        loaded(folder)
