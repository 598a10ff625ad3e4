"""A target held in parts: what is read of its files, that it is what the whole target has, and that
trainings are the same."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import tests.train.micro_run as micro_run
from heads.api.checkpoint import new_drafter
from heads.api.errors import UserError
from heads.api.registry import get_kind
from inference.manifest import read_manifest
from inference.target.loading import TargetConfig
from inference.target.model import TargetModel
from tests.heads.recipes import WITH_WEIGHTS, recipe
from tests.inference.export.ground import save_target
from tests.inference.target.test_packed_target import quantised_target
from tests.inference.tokenizers import tiny_tokenizer
from tests.models import save_random_target
from tests.train import launch
from tests.train.features.test_store import job, write
from train.features.config import FeaturesConfig
from train.on_policy import OnPolicyConfig
from train.refresh import RefreshConfig
from train.run import train
from train.target.parts import StoredWeights, load_parts

INDEX = "model.safetensors.index.json"
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama, tied": {"tie_word_embeddings": True},
    "gemma2": {"tie_word_embeddings": True, "final_logit_softcapping": 3.0},
    "phi": {},  # a bias in the LM head
    "granite": {"logits_scaling": 4.0},
    "gpt2": {},
    "qwen3_moe": {},  # transformers puts its experts together from many tensors
}
UNSEEN: dict[str, Any] = {"eval_every": 0, "parity": False, "save_every": 0, "max_steps": 4}
"""Settings of a training that never runs its target."""


pytestmark = pytest.mark.usefixtures("one_thread")


def config_of(folder: Path, dtype: str = "float32") -> TargetConfig:
    return TargetConfig(str(folder), device="cpu", dtype=dtype)


def in_shards(folder: Path) -> Path:
    """Save a model's folder again with an index and many small files."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="12KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 3
    return folder


def stored(target: TargetModel) -> StoredWeights:
    state = target.weights.state
    assert isinstance(state, StoredWeights)
    return state


# The same target


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_parts_are_those_of_the_whole_target(tmp_path: Path, family: str, dtype: str) -> None:
    folder = save_random_target(
        tmp_path / "target", tiny_tokenizer("marked"), family.split(",")[0], **FAMILIES[family]
    )
    if dtype == "bfloat16":
        in_shards(folder)
    whole, parts = TargetModel.load(config_of(folder, dtype)), load_parts(config_of(folder, dtype))
    ours, theirs = parts.weights, whole.weights
    modules = (parts.model.get_input_embeddings(), parts.model.get_output_embeddings())
    ends = {id(each): each.nbytes for module in modules for each in module.parameters()}
    assert sorted(stored(parts).files.read_so_far.values()) == sorted(ends.values())
    assert whole.final_norm is not None
    normed = load_parts(config_of(folder, dtype), norm=True).final_norm
    assert normed is not None
    for mine, true in zip(normed.parameters(), whole.final_norm.parameters(), strict=True):
        assert torch.equal(mine, true)
    layers = list(parts.taps.layers.parameters())
    assert layers and all(parameter.device.type == "meta" for parameter in layers)
    assert parts.info == whole.info
    assert parts.eos_token_ids == whole.eos_token_ids
    assert torch.equal(ours.embedding, theirs.embedding) and torch.equal(
        ours.lm_head, theirs.lm_head
    )
    assert (ours.lm_head is ours.embedding) == (theirs.lm_head is theirs.embedding)
    states = torch.randn(5, whole.info.hidden_size, generator=torch.Generator().manual_seed(0)).to(
        whole.dtype
    )
    with torch.no_grad():
        assert torch.equal(ours.logits(states), theirs.logits(states))
    assert ours.windows == theirs.windows
    if theirs.rotary is not None and ours.rotary is not None:
        assert torch.equal(ours.rotary.inverse_frequencies, theirs.rotary.inverse_frequencies)
    assert (ours.rotary is None) == (theirs.rotary is None)
    assert list(ours.state) == list(theirs.state)
    for name, value in theirs.state.items():
        if ".experts." in name:
            with pytest.raises(
                UserError, match=r"put together from several tensors.*trainer_target=whole"
            ):
                ours.state[name]
        else:
            assert torch.equal(ours.state[name], value) and ours.state[name].dtype == value.dtype, (
                name
            )
    assert "no such weight" not in ours.state and ours.state.get("no such weight") is None


def test_a_head_that_a_config_ties_and_a_file_does_not_stays_its_own(tmp_path: Path) -> None:
    folder = save_random_target(
        tmp_path / "target", tiny_tokenizer("marked"), tie_word_embeddings=True
    )
    tensors = load_file(folder / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    for head, apart in ((embedding + 1, True), (embedding.clone(), False)):
        save_file(
            {**tensors, "lm_head.weight": head},
            folder / "model.safetensors",
            metadata={"format": "pt"},
        )
        whole, parts = TargetModel.load(config_of(folder)), load_parts(config_of(folder))
        assert (parts.weights.lm_head is not parts.weights.embedding) == apart
        assert torch.equal(parts.weights.lm_head, whole.weights.lm_head)
        assert parts.info == whole.info
        assert list(parts.weights.state) == list(whole.weights.state)
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(load_parts(config_of(folder)).weights.embedding, embedding)


def test_a_hub_repository_is_asked_for_the_files_that_are_needed_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = "c0ffee" + "0" * 34
    snapshot = tmp_path / "hub" / "models--someone--tiny" / "snapshots" / commit
    in_shards(save_random_target(snapshot, tiny_tokenizer("marked")))
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text(commit)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    config = TargetConfig("someone/tiny", device="cpu")
    whole = TargetModel.load(config)
    places = json.loads((snapshot / INDEX).read_text())["weight_map"]
    kept = {places["model.embed_tokens.weight"], places["lm_head.weight"]}
    for path in snapshot.glob("model-*.safetensors"):
        if path.name not in kept:
            path.unlink()
    parts = load_parts(config)
    assert parts.info == whole.info and parts.info.revision == commit
    assert torch.equal(parts.weights.lm_head, whole.weights.lm_head)
    gone = next(name for name, place in places.items() if place not in kept)
    with pytest.raises(UserError, match=r"someone/tiny.*model-.*safetensors"):
        parts.weights.state[gone]


@pytest.mark.parametrize("form", ["int8", "nvfp4", "modelopt_fp8", "fp8 blocks", "bnb int8"])
def test_the_plain_weights_of_a_quantised_target_are_read(tmp_path: Path, form: str) -> None:
    folder = save_target(tmp_path / "target")
    plain = load_parts(config_of(folder))
    if form == "fp8 blocks":
        in_fp8_blocks(folder)
    elif form == "bnb int8":
        in_bnb_int8(folder)
    else:
        quantised_target(folder, form)
    parts = load_parts(config_of(folder), norm=True)
    assert torch.equal(parts.weights.embedding, plain.weights.embedding)
    assert torch.equal(parts.weights.lm_head, plain.weights.lm_head)
    assert parts.final_norm is not None
    assert parts.info == replace(plain.info, revision=parts.info.revision)
    norm = "model.layers.1.input_layernorm.weight"
    assert torch.equal(parts.weights.state[norm], plain.weights.state[norm])
    with pytest.raises(UserError, match=r"down_proj\.weight is quantised in its files"):
        parts.weights.state["model.layers.1.mlp.down_proj.weight"]


def in_bnb_int8(folder: Path) -> None:
    """Replace a target's linear layers by int8 of the same shape, as bitsandbytes' files."""
    tensors = load_file(folder / "model.safetensors")
    for name in [each for each in tensors if each.endswith("_proj.weight")]:
        rows = tensors[name].abs().amax(1)
        tensors[name] = (tensors[name] / rows[:, None] * 127).round().to(torch.int8)
        tensors[name.replace("weight", "SCB")] = rows
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    (folder / "config.json").write_text(json.dumps(config))


def in_fp8_blocks(folder: Path) -> None:
    """Replace a target's linear layers by fp8 with one scale per block, as DeepSeek's files."""
    tensors = load_file(folder / "model.safetensors")
    for name in [each for each in tensors if each.endswith("_proj.weight")]:
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = torch.ones(1, 1)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("name", WITH_WEIGHTS)
def test_every_kind_starts_from_parts_as_from_the_whole_target(
    targets: tuple[TargetModel, Path], name: str
) -> None:
    whole, folder = targets
    parts = load_parts(config_of(folder))
    kind, config = recipe(name)
    counts = torch.arange(whole.info.vocab_size)
    one, other = (
        new_drafter(kind, config, target.info, target.weights, 3, counts)
        for target in (whole, parts)
    )
    assert list(one.state_dict()) == list(other.state_dict())
    for key, value in one.state_dict().items():
        assert torch.equal(value, other.state_dict()[key]), key


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> tuple[TargetModel, Path]:
    """A whole target of three layers, and its folder."""
    folder = save_random_target(
        tmp_path_factory.mktemp("three") / "target", tiny_tokenizer("marked")
    )
    return TargetModel.load(config_of(folder)), folder


# The same training


@pytest.fixture(scope="module", params=["one file", "shards"])
def micro(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A micro target with its answers, as one file or as several with an index; and a store of its
    features."""
    folder = tmp_path_factory.mktemp("micro")
    plain = micro_run.save_micro_target
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "shards":
            patch.setattr(micro_run, "save_micro_target", lambda place: in_shards(plain(place)))
        micro_run.prepare(folder)
    heads = [(kind, kind, get_kind(kind).config_class(**head)) for kind, head in HEADS.items()]
    write(job(folder, folder / "store", *heads))
    return folder


HEADS: dict[str, dict[str, Any]] = {
    "eagle3": {"taps": (0, 1, 2), "ttt_steps": 2, "from_target_layer": 1},
    "medusa": {"num_heads": 3},
    "distilled": {"from_target_layers": (1,)},
}


def run(micro: Path, out: Path, kind: str, trainer_target: str = "whole", **changes: Any) -> bytes:
    """The weights that a training from the store ends with."""
    features = {
        "mode": "store",
        "path": str(micro / "store"),
        "format": "fp32",
        "trainer_target": trainer_target,
    }
    given = micro_run.settings(
        micro, kind=kind, head=HEADS[kind], features=features, **{**UNSEEN, **changes}
    )
    train(out=out, **given)
    return (out / "best" / "model.safetensors").read_bytes()


@pytest.mark.parametrize("kind", HEADS)
def test_training_from_a_store_with_parts_is_training_with_the_whole_target(
    micro: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(micro, tmp_path / "whole", kind)
    seen: list[StoredWeights] = []
    plain = StoredWeights.__init__

    def note(self: StoredWeights, *given: Any) -> None:
        plain(self, *given)
        seen.append(self)

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("the whole target was loaded")

    monkeypatch.setattr(StoredWeights, "__init__", note)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", refuse)
    assert run(micro, tmp_path / "parts", kind, "parts") == whole
    [state] = seen
    assert (
        read_manifest(tmp_path / "parts", "train")["target"]
        == read_manifest(tmp_path / "whole", "train")["target"]
    )
    read = set(state.files.read_so_far)
    assert read >= {"model.embed_tokens.weight", "lm_head.weight"}
    assert {name.split(".")[2] for name in read if ".layers." in name} == (
        set() if kind == "medusa" else {"1"}
    )
    layers = [parameter for name, parameter in state.data.items() if ".layers." in name]
    assert layers and all(parameter.device.type == "meta" for parameter in layers)


@pytest.mark.parametrize("micro", ["shards"], indirect=True)
def test_a_refresh_with_low_rank_updates_starts_from_parts(micro: Path, tmp_path: Path) -> None:
    run(micro, tmp_path / "old", "distilled")
    start = RefreshConfig(
        str(tmp_path / "old" / "best"), lora_rank=2, old_target=str(micro / "target")
    )
    ways = [
        run(micro, tmp_path / way, "distilled", way, refresh=start) for way in ("whole", "parts")
    ]
    assert ways[0] == ways[1]


@pytest.mark.parametrize("micro", ["shards"], indirect=True)
def test_rows_may_be_rewritten_where_servers_run_the_target(micro: Path, tmp_path: Path) -> None:
    from tests.train.features.test_remote import serving

    target = TargetModel.load(config_of(micro / "target"))
    made = []
    for way in ("whole", "parts"):
        with serving(target) as server:
            features = {
                "mode": "remote",
                "servers": (server.address,),
                "format": "fp32",
                "trainer_target": way,
            }
            more = {
                "on_policy": OnPolicyConfig(share=0.5, window=3),
                "features": features,
                "head": HEADS["eagle3"],
            }
            train(out=tmp_path / way, **micro_run.settings(micro, kind="eagle3", **UNSEEN, **more))
        made.append((tmp_path / way / "best" / "model.safetensors").read_bytes())
    assert made[0] == made[1]


@pytest.mark.parametrize("micro", ["shards"], indirect=True)
def test_trainers_of_a_group_hold_parts(micro: Path, tmp_path: Path) -> None:
    whole = run(micro, tmp_path / "whole", "medusa")
    features = {"mode": "group", "targets": 1, "format": "fp32", "trainer_target": "parts"}
    pairs = {**UNSEEN, "kind": "medusa", "head": HEADS["medusa"], "features": features}
    output = launch.run(
        2,
        "tests.train.micro_run",
        micro,
        tmp_path / "group",
        *(f"{key}={json.dumps(value)}" for key, value in pairs.items()),
    )
    assert "target held in parts" in output, output[-2000:]
    assert (tmp_path / "group" / "best" / "model.safetensors").read_bytes() == whole


# Refusals


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"eval_every": 3},
            r"measuring tau decodes with them \(train\.eval_every=0.*Change that, or use",
        ),
        ({"parity": True}, r"the parity check runs them \(train\.parity=false\)"),
        (
            {"eval_every": 3, "parity": True},
            r"measuring tau .*; the parity check.*Change those, or use .*trainer_target=whole",
        ),
        (
            {"features": {"trainer_target": "parts"}},
            r"features\.mode=online runs them in every trainer",
        ),
        ({"engine": {"target_sharding": "zero3"}}, r"engine\.target_sharding divides them"),
    ],
)
def test_what_needs_the_layers_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    features = {"features": {"mode": "store", "trainer_target": "parts"}}
    with pytest.raises(UserError, match=message):
        train(
            out=tmp_path / "out",
            **micro_run.settings(tmp_path, **{**UNSEEN, **features, **changes}),
        )


def test_files_that_cannot_be_read_in_parts_are_named(
    targets: tuple[TargetModel, Path], tmp_path: Path
) -> None:
    folder = tmp_path / "target"
    shutil.copytree(targets[1], folder)
    parts = load_parts(config_of(folder))
    with pytest.raises(RuntimeError, match="held in parts and has no layers to run"):
        parts.decoder(input_ids=torch.tensor([[1, 2]]))
    tensors = load_file(folder / "model.safetensors")
    lost = {name: value for name, value in tensors.items() if "layers.1.mlp.up" not in name}
    save_file(lost, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        UserError, match=r"is incomplete: weights \['model\.layers\.1\.mlp\.up_proj\.weight'\]"
    ):
        load_parts(config_of(folder))
    (folder / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(UserError, match=r"cannot be read .*Fetch it again"):
        load_parts(config_of(folder))
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    with pytest.raises(
        UserError, match=r"has neither model\.safetensors nor .*trainer_target=whole"
    ):
        load_parts(config_of(folder))
    with pytest.raises(UserError, match=r"features\.trainer_target 'half' is unknown"):
        FeaturesConfig(trainer_target="half")
