"""Drafters with quantised weights: what is written, read back, checked, and refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from heads.api.errors import UserError
from inference.export.check.config import VerifyConfig
from inference.export.check.verify import verify
from inference.export.importing import import_folder
from inference.export.layouts.folder import Folder
from inference.export.layouts.registry import LAYOUTS
from inference.export.quantised import PLAIN
from inference.target.model import TargetModel
from inference.target.packed_weights import dequantise, sort_parts
from tests.inference.export.ground import save, target_config, tensors, write
from tests.inference.target.test_packed_weights import error_bound

LAYOUT_OF = {
    "eagle": "eagle",
    "eagle3": "eagle3",
    "peagle_whole": "peagle",
    "distilled_qwen3": "causal",
    "dflash_token": "dflash",
    "dspark": "dspark",
}
WEIGHTS = "model.safetensors"


@pytest.mark.rotated
@pytest.mark.parametrize("quantise", ["int8", "fp8", "nvfp4"])
@pytest.mark.parametrize("name", LAYOUT_OF)
def test_weights_come_back_within_the_bound(
    target: TargetModel, tmp_path: Path, name: str, quantise: str
) -> None:
    mine = save(target, name, tmp_path / "mine")
    write(target, mine, tmp_path / "plain", "vllm")
    write(target, mine, tmp_path / "out", "vllm", quantise=quantise)
    plain = load_file(tmp_path / "plain" / WEIGHTS)
    found = sort_parts(load_file(tmp_path / "out" / WEIGHTS))
    pattern = LAYOUTS[LAYOUT_OF[name]].linear
    assert found.layers.keys() == {
        each.removesuffix(".weight")
        for each in plain
        if re.fullmatch(rf"({pattern})\.weight", each)
    }
    assert len(found.layers) >= 7
    for layer, parts in found.layers.items():
        gap = (dequantise(parts, torch.float32) - plain[f"{layer}.weight"]).abs()
        assert bool((gap <= error_bound(parts)).all())
    assert all(torch.equal(value, plain[each]) for each, value in found.others.items())
    assert verify(VerifyConfig(str(tmp_path / "out")), target_config(target), target).faults == []


def scaled(mine: Path, factor: float) -> None:
    """Make the values and gates of a checkpoint `factor` times larger than queries and ups."""
    stored = tensors(mine)
    for name, value in stored.items():
        if name.endswith(("v_proj.weight", "gate_proj.weight")):
            stored[name] = value * factor
    save_file(stored, mine / WEIGHTS, {"format": "pt"})


@pytest.mark.parametrize("name", LAYOUT_OF)
def test_layers_that_vllm_joins_share_a_global_scale(
    target: TargetModel, tmp_path: Path, name: str
) -> None:
    """vLLM's reading of nvfp4: the codes and scales of all parts one below the other, and the
    largest global scale for all of them."""
    mine = save(target, name, tmp_path / "mine")
    scaled(mine, 3.0)
    write(target, mine, tmp_path / "plain", "vllm")
    write(target, mine, tmp_path / "out", "vllm", quantise="nvfp4")
    plain = load_file(tmp_path / "plain" / WEIGHTS)
    layers = sort_parts(load_file(tmp_path / "out" / WEIGHTS)).layers
    checked = 0
    for first in [each for each in layers if each.endswith(("q_proj", "gate_proj"))]:
        ends = (
            ("q_proj", "k_proj", "v_proj") if first.endswith("q_proj") else ("gate_proj", "up_proj")
        )
        start = first.removesuffix(ends[0])
        shards = [layers[f"{start}{end}"] for end in ends]
        joined = {
            end: torch.cat([shard[end] for shard in shards])
            for end in ("weight_packed", "weight_scale")
        }
        scales = torch.stack([shard["weight_global_scale"] for shard in shards])
        joined["weight_global_scale"] = scales.max().reshape(1)
        wanted = torch.cat([plain[f"{start}{end}.weight"] for end in ends])
        gap = (dequantise(joined, torch.float32) - wanted).abs()
        assert bool((gap <= error_bound(joined)).all()), first
        checked += 1
    assert checked >= 2


def test_unequal_global_scales_are_a_fault_of_the_folder_and_not_of_an_import(
    target: TargetModel, tmp_path: Path
) -> None:
    mine = save(target, "eagle3", tmp_path / "mine")
    write(target, mine, tmp_path / "out", "vllm", quantise="nvfp4")
    file = tmp_path / "out" / WEIGHTS
    stored = load_file(file)
    name = next(each for each in stored if each.endswith("v_proj.weight_global_scale"))
    stored[name] = stored[name] * 2
    save_file(stored, file)
    found = verify(VerifyConfig(str(tmp_path / "out")), target_config(target), target).faults
    assert any("weight_global_scale is not that of" in each and "_proj" in each for each in found)
    (tmp_path / "out" / "headstart_export.json").unlink()
    import_folder(Folder.read(tmp_path / "out"), target, tmp_path / "back")
    layer = name.removesuffix(".weight_global_scale")
    own = dequantise(sort_parts(stored).layers[layer], torch.float32)
    found_again = next(
        v for k, v in tensors(tmp_path / "back").items() if k.endswith("v_proj.weight")
    )
    assert torch.equal(found_again, own)


def test_an_import_makes_weights_plain(target: TargetModel, tmp_path: Path) -> None:
    mine = save(target, "eagle3", tmp_path / "mine")
    write(target, mine, tmp_path / "out", "vllm", quantise="int8")
    import_folder(Folder.read(tmp_path / "out"), target, tmp_path / "back")
    own, back = tensors(mine), tensors(tmp_path / "back")
    parts = sort_parts(load_file(tmp_path / "out" / WEIGHTS)).layers["fc"]
    assert torch.equal(back["fc.weight"], dequantise(parts, torch.float32))
    assert not torch.equal(back["fc.weight"], own["fc.weight"])
    assert torch.equal(back["lm_head.weight"], own["lm_head.weight"])


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        ("shape", "quantised: 'fc': scales of shape"),
        ("missing", "tensor: 'fc.weight' is missing"),
        ("negative", "quantised: 'fc': weight_scale holds values that are no positive numbers"),
    ],
)
def test_damaged_scales_are_faults(
    target: TargetModel, tmp_path: Path, damage: str, fault: str
) -> None:
    mine = save(target, "eagle3", tmp_path / "mine")
    write(target, mine, tmp_path / "out", "vllm", quantise="fp8")
    file = tmp_path / "out" / WEIGHTS
    stored = load_file(file)
    scale = stored.pop("fc.weight_scale")
    if damage == "missing":
        del stored["fc.weight"]
    else:
        stored["fc.weight_scale"] = scale[:-1].clone() if damage == "shape" else -scale
    save_file(stored, file)
    found = verify(VerifyConfig(str(tmp_path / "out")), target_config(target), target).faults
    assert any(fault in each for each in found), found
    (tmp_path / "out" / "headstart_export.json").unlink()
    with pytest.raises(UserError, match=r"damaged|lacks|missing"):
        import_folder(Folder.read(tmp_path / "out"), target, tmp_path / "back")


@pytest.mark.parametrize(
    ("name", "engine", "message"),
    [
        ("medusa", "vllm", "vLLM builds drafters of layout medusa without a quantization"),
        ("fastmtp", "vllm", "layout mtp-mimo without"),
        ("eagle3_plain", "sglang", "given export.engine=sglang"),
        ("eagle3", "speculators", "given export.engine=speculators"),
    ],
)
def test_what_the_engine_reads_plain_is_refused(
    target: TargetModel, tmp_path: Path, name: str, engine: str, message: str
) -> None:
    mine = save(target, name, tmp_path / "mine")
    with pytest.raises(UserError, match=message):
        write(target, mine, tmp_path / "out", engine, quantise="int8")
    assert not (tmp_path / "out").exists()


def test_another_librarys_layout_is_refused(target: TargetModel, tmp_path: Path) -> None:
    mine = save(target, "eagle3", tmp_path / "mine")
    write(target, mine, tmp_path / "out", "vllm", quantise="int8")
    path = tmp_path / "out" / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["quant_method"] = "awq"
    path.write_text(json.dumps(config))
    with pytest.raises(UserError, match="is quantised with awq"):
        verify(VerifyConfig(str(tmp_path / "out")), target_config(target), target)
    config["quantization_config"] |= {"quant_method": "compressed-tensors", "format": "marlin-24"}
    path.write_text(json.dumps(config))
    with pytest.raises(UserError, match="is quantised as marlin-24"):
        verify(VerifyConfig(str(tmp_path / "out")), target_config(target), target)


def test_modules_that_vllm_builds_with_layers_of_their_own_stay_as_they_are() -> None:
    """DFlash 2's convolutions and LiLiCorr's correlator: vLLM would read them without scales."""
    patterns = [one.removeprefix("re:") for one in PLAIN if one.startswith("re:")]
    for name in (
        "layers.0.attention_conv.kernel_projection",
        "layers.1.mlp_conv.kernel_projection",
        "lilicorr.token_proj",
        "lilicorr.layers.0.mlp.up_proj",
    ):
        assert any(re.match(pattern, name) for pattern in patterns), name
    assert not any(re.match(pattern, "layers.0.mlp.up_proj") for pattern in patterns)
