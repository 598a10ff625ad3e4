"""A target's own MTP block: read from checkpoints as their families write them, exported alone and
stitched into the target, and everything back bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from heads.api.checkpoint import load_drafter, new_drafter, save_drafter
from heads.api.errors import UserError
from heads.native_mtp import Config, Drafter
from heads.nn.native.family import one_layer
from inference.export.check.config import VerifyConfig
from inference.export.check.verify import verify
from inference.export.config import ExportConfig
from inference.export.engine_folder import export, prepare
from inference.export.hub.folder import read_export
from inference.export.importing import import_folder, read_folder
from inference.export.layouts.base import Target
from inference.folders import EXPORT_FILE
from inference.target.loading import TargetConfig
from inference.target.model import TargetModel
from tests.inference.tokenizers import tiny_tokenizer
from tests.models import ALL_FAMILIES, RECURRENT_FAMILIES, save_random_target

EXPERTS = ["gate_proj.weight", "up_proj.weight", "down_proj.weight"]
NAMES: dict[str, list[str]] = {
    "qwen3_next": [
        *("mtp.fc.weight", "mtp.norm.weight"),
        *("mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight"),
        *("mtp.layers.0.self_attn.q_norm.weight", "mtp.layers.0.mlp.gate.weight"),
        *(f"mtp.layers.0.mlp.experts.3.{name}" for name in EXPERTS),
        *(f"mtp.layers.0.mlp.shared_expert.{name}" for name in EXPERTS),
        "mtp.layers.0.mlp.shared_expert_gate.weight",
    ],
    "qwen3_5_text": ["mtp.fc.weight", "mtp.layers.0.mlp.gate_proj.weight"],
    "deepseek_v3": [
        *("model.layers.3.enorm.weight", "model.layers.3.hnorm.weight"),
        *("model.layers.3.eh_proj.weight", "model.layers.3.shared_head.norm.weight"),
        *("model.layers.3.self_attn.kv_b_proj.weight", "model.layers.3.mlp.gate.weight"),
        *("model.layers.3.mlp.gate.e_score_correction_bias",),
        *(f"model.layers.3.mlp.experts.0.{name}" for name in EXPERTS),
        "model.layers.3.input_layernorm.weight",
    ],
}
"""Tensors that published checkpoints of a family have under these very names, three layers deep."""


class Ground:
    """A small random target of a family on disk, and a block for it."""

    def __init__(self, family: str, folder: Path) -> None:
        self.recurrent = family in RECURRENT_FAMILIES
        self.folder = save_random_target(
            folder / "target", tiny_tokenizer("chatml"), family, recurrent=self.recurrent
        )
        self.config = TargetConfig(path=str(self.folder), device="cpu")
        self.target = TargetModel.load(self.config)
        layer = one_layer(self.target.model.config)
        info, weights = self.target.info, self.target.weights
        self.drafter: Drafter = new_drafter(
            "native_mtp", Config(layer=layer, depths=2), info, weights, seed=3
        )
        for parameter in self.drafter.parameters():
            parameter.data.normal_(0, 0.2)
        self.checkpoint = folder / "best"
        save_drafter(self.drafter, self.checkpoint, info)

    def export(self, out: Path, **options: Any) -> Path:
        config = ExportConfig(out=str(out), **options)
        checkpoint = prepare(self.checkpoint, config.engine)
        self.notes = export(config, checkpoint, Target.of(self.config, checkpoint.info), out)
        return out

    def imported(self, source: Path, out: Path) -> dict[str, Tensor]:
        import_folder(read_folder(source), self.target, out)
        again = load_drafter(out, self.target.info, self.target.weights)
        assert again.kind == "native_mtp"
        return dict(again.state_dict())


@pytest.fixture(params=NAMES)
def ground(request: pytest.FixtureRequest, tmp_path: Path) -> Ground:
    return Ground(str(request.param), tmp_path)


def of_block(folder: Path) -> dict[str, Tensor]:
    return read_folder(folder).tensors


def require_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_block_alone_has_its_familys_names_and_comes_back(
    ground: Ground, engine: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    out = ground.export(tmp_path / "alone", engine=engine)
    tensors = load_file(out / "model.safetensors")
    wanted = NAMES[request.node.callspec.params["ground"]]
    assert set(wanted) <= set(tensors)
    own = json.loads((out / "config.json").read_text())
    target = json.loads((ground.folder / "config.json").read_text())
    assert own["architectures"] == target["architectures"]
    assert own["model_type"] == target["model_type"]
    assert ground.notes.speculative_config == {"method": "mtp", "num_speculative_tokens": 2}
    require_same(ground.imported(out, tmp_path / "again"), dict(ground.drafter.state_dict()))


def test_a_stitched_target_is_the_target_and_holds_the_block(
    ground: Ground, tmp_path: Path
) -> None:
    out = ground.export(tmp_path / "whole", stitch=True)
    assert "--speculative-config" in ground.notes.serve and str(out) in ground.notes.serve
    assert '"model"' not in ground.notes.serve
    index = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    held = {name for path in out.glob("*.safetensors") for name in load_file(path)}
    assert set(index) == held
    digest = ground.notes.source["sha256"]
    with pytest.raises(UserError, match=r"contains the whole target \(export\.stitch=true\)"):
        read_export("vllm", out, digest, "someone/target")
    model = AutoModelForCausalLM.from_pretrained(out, dtype="float32")
    theirs = AutoModelForCausalLM.from_pretrained(ground.folder, dtype="float32")
    require_same(dict(model.state_dict()), dict(theirs.state_dict()))
    require_same(ground.imported(out, tmp_path / "again"), dict(ground.drafter.state_dict()))
    # a second block replaces the first
    ground.folder = out
    other = {name: value + 1 for name, value in ground.drafter.state_dict().items()}
    changed: Any = ground.drafter
    changed.load_state_dict(other)
    save_drafter(changed, ground.checkpoint, ground.target.info)
    ground.config = TargetConfig(path=str(out), device="cpu")
    again = tmp_path / "replaced"
    config = ExportConfig(out=str(again), stitch=True)
    export(config, prepare(ground.checkpoint, "vllm"), Target(ground.config), again)
    require_same(ground.imported(again, tmp_path / "third"), other)


def test_a_target_of_which_files_are_missing_is_not_stitched(tmp_path: Path) -> None:
    """As the Hub's cache has it after a download that was cut off."""
    ground = Ground("qwen3_5_text", tmp_path)
    whole = ground.folder / "model.safetensors"
    tensors = load_file(whole)
    names = sorted(tensors)
    shards = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    weight_map = {name: shards[place % 2] for place, name in enumerate(names)}

    def put(shard: str, left_out: str = "") -> None:
        own = {name: tensors[name] for name in names if weight_map[name] == shard}
        own.pop(left_out, None)
        save_file(own, ground.folder / shard, {"format": "pt"})

    for shard in shards:
        put(shard)
    whole.unlink()
    index = {"metadata": {}, "weight_map": weight_map}
    (ground.folder / "model.safetensors.index.json").write_text(json.dumps(index))
    out, checkpoint = tmp_path / "whole", prepare(ground.checkpoint, "vllm")
    config, target = ExportConfig(out=str(out), stitch=True), Target(ground.config)

    def refused(words: str) -> None:
        with pytest.raises(UserError, match=words) as caught:
            export(config, checkpoint, target, out)
        assert not out.exists() and "Save the target" not in str(caught.value)

    (ground.folder / shards[1]).unlink()
    refused(rf"lacks 1 of the 2 weight files .* such as {shards[1]}\. Fetch the whole target")
    (ground.folder / shards[0]).rename(tmp_path / shards[0])
    refused("lacks 2 of the 2 weight files")
    (tmp_path / shards[0]).rename(ground.folder / shards[0])
    put(shards[1], names[1])
    refused(rf"lacks 1 of the {len(names)} tensors .* such as '{names[1]}'")
    put(shards[1])
    export(config, checkpoint, target, out)
    listed = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    assert set(names) <= set(listed)


def test_a_block_of_a_quantised_target_is_not_described_as_quantised(tmp_path: Path) -> None:
    ground = Ground("qwen3_5_text", tmp_path)
    path, checkpoint = ground.folder / "config.json", prepare(ground.checkpoint, "vllm")
    fp8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": fp8}))
    alone, target = tmp_path / "alone", Target(ground.config)
    notes = export(ExportConfig(out=str(alone)), checkpoint, target, alone)
    assert "quantization_config" not in json.loads((alone / "config.json").read_text())
    assert any("this block's are plain" in note for note in notes.notes)
    whole = tmp_path / "whole"
    with pytest.raises(UserError, match=r"weights are quantised .*export\.stitch=false"):
        export(ExportConfig(out=str(whole), stitch=True), checkpoint, target, whole)
    assert not whole.exists()


def test_no_file_of_the_target_is_changed_and_its_dtype_stays(tmp_path: Path) -> None:
    """Files are linked: writing over one would change the target."""
    ground = Ground("qwen3_5_text", tmp_path)
    path = ground.folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "dtype": "bfloat16"}))
    (ground.folder / "model.safetensors").rename(ground.folder / "mtp-0.safetensors")
    before = {file.name: file.read_bytes() for file in ground.folder.iterdir()}
    out = tmp_path / "whole"
    config = ExportConfig(out=str(out), stitch=True)
    export(config, prepare(ground.checkpoint, "vllm"), Target(ground.config), out)
    assert {file.name: file.read_bytes() for file in ground.folder.iterdir()} == before
    assert (out / "mtp-1.safetensors").is_file()
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    require_same(ground.imported(out, tmp_path / "again"), dict(ground.drafter.state_dict()))


def test_the_static_check_passes_and_finds_what_is_missing(ground: Ground, tmp_path: Path) -> None:
    out = ground.export(tmp_path / "alone")
    verdict = verify(VerifyConfig(dir=str(out)), ground.config, ground.target)
    assert verdict.layout == "mtp-native" and not verdict.faults, verdict.faults
    tensors = load_file(out / "model.safetensors")
    lost = next(name for name in sorted(tensors) if "self_attn" in name)
    save_file(
        {name: value for name, value in tensors.items() if name != lost},
        out / "model.safetensors",
        {"format": "pt"},
    )
    verdict = verify(VerifyConfig(dir=str(out)), ground.config, ground.target)
    assert any(lost in fault for fault in verdict.faults)
    (out / EXPORT_FILE).unlink()
    with pytest.raises(UserError, match=f"lacks '{lost}'"):
        ground.imported(out, tmp_path / "again")


def test_copies_of_the_target_are_left_out_and_others_refused(tmp_path: Path) -> None:
    ground = Ground("deepseek_v3", tmp_path)
    out = ground.export(tmp_path / "alone")
    (out / EXPORT_FILE).unlink()  # as another trainer would have written it
    weights = out / "model.safetensors"
    tensors = load_file(weights)
    embedding = ground.target.weights.embedding.float().clone()
    tensors["model.layers.3.embed_tokens.weight"] = embedding
    tensors["model.layers.3.shared_head.head.weight"] = ground.target.weights.lm_head.clone()
    save_file(tensors, weights, {"format": "pt"})
    require_same(ground.imported(out, tmp_path / "again"), dict(ground.drafter.state_dict()))
    tensors["model.layers.3.embed_tokens.weight"] = embedding + 1
    save_file(tensors, weights, {"format": "pt"})
    with pytest.raises(UserError, match="an embedding of its own"):
        ground.imported(out, tmp_path / "other")


def test_quantised_and_strange_blocks_are_refused(tmp_path: Path) -> None:
    ground = Ground("qwen3_5_text", tmp_path)
    out = ground.export(tmp_path / "alone")
    (out / EXPORT_FILE).unlink()  # as another trainer would have written it
    weights = out / "model.safetensors"
    tensors = load_file(weights)
    name = "mtp.layers.0.mlp.gate_proj.weight"
    save_file({**tensors, name: tensors[name].to(torch.float8_e4m3fn)}, weights, {"format": "pt"})
    with pytest.raises(UserError, match="quantised weights"):
        ground.imported(out, tmp_path / "a")
    own = {"mtp.layers.0.own.weight": tensors[name].clone()}
    save_file({**tensors, **own}, weights, {"format": "pt"})
    with pytest.raises(UserError, match=r"has 'mtp.layers.0.own.weight'.*do not have"):
        ground.imported(out, tmp_path / "b")
    save_file({**tensors, name: tensors[name][:, :5].contiguous()}, weights, {"format": "pt"})
    with pytest.raises(UserError, match=r"has shape \[64, 5\], expected \[64, 32\]"):
        ground.imported(out, tmp_path / "c")


def test_a_target_without_blocks_in_engines_is_refused(tmp_path: Path) -> None:
    assert "llama" in ALL_FAMILIES
    ground = Ground("llama", tmp_path)
    with pytest.raises(UserError, match="no MTP block for model type 'llama'"):
        ground.export(tmp_path / "alone")


def test_a_layer_of_other_sizes_than_the_targets_is_not_exported(tmp_path: Path) -> None:
    """An engine builds the block by the target's config.json, whatever the weights are."""
    ground = Ground("qwen3_5_text", tmp_path)
    info, weights = ground.target.info, ground.target.weights
    layer = {**one_layer(ground.target.model.config), "intermediate_size": 48}
    other = new_drafter("native_mtp", Config(layer=layer), info, weights, seed=3)
    ground.checkpoint = tmp_path / "other"
    save_drafter(other, ground.checkpoint, info)
    said = r"mlp\.down_proj\.weight' is \[32, 48\], in the block .* it is \[32, 64\]"
    with pytest.raises(UserError, match=said):
        ground.export(tmp_path / "alone")


def test_mimos_block_reads_the_state_first_and_has_biases(tmp_path: Path) -> None:
    """Its layer is Qwen2's, which the target's model type does not say."""
    ground = Ground("qwen2", tmp_path)
    path = ground.folder / "config.json"
    described = json.loads(path.read_text())
    path.write_text(json.dumps({**described, "model_type": "mimo"}))
    drafter = ground.drafter.state_dict()
    prefix = "model.mtp_layers.0."
    renamed = {
        "mtp.fc.weight": "input_proj.weight",
        "mtp.pre_fc_norm_embedding.weight": "token_layernorm.weight",
        "mtp.pre_fc_norm_hidden.weight": "hidden_layernorm.weight",
        "mtp.norm.weight": "final_layernorm.weight",
    }
    block = {
        prefix + renamed.get(name, name.removeprefix("mtp.layers.0.")): value.clone()
        for name, value in drafter.items()
    }
    token, state = drafter["mtp.fc.weight"].chunk(2, 1)
    block[prefix + "input_proj.weight"] = torch.cat([state, token], 1)
    assert prefix + "self_attn.q_proj.bias" in block
    save_file(block, ground.folder / "mtp.safetensors", {"format": "pt"})
    require_same(ground.imported(ground.folder, tmp_path / "again"), dict(drafter))


def test_a_block_is_not_stitched_for_other_kinds(tmp_path: Path) -> None:
    ground = Ground("qwen3_5_text", tmp_path)
    from heads.api.registry import get_kind

    medusa = new_drafter(
        "medusa",
        get_kind("medusa").config_class(),
        ground.target.info,
        ground.target.weights,
        seed=1,
    )
    ground.checkpoint = tmp_path / "medusa"
    save_drafter(medusa, ground.checkpoint, ground.target.info)
    with pytest.raises(UserError, match=r"export\.stitch puts a target's own MTP block"):
        ground.export(tmp_path / "alone", stitch=True)
