"""A frozen target divided among training processes: the same features, decoding, losses and tau as
the whole one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from heads.api.errors import UserError
from inference.target.loading import TargetConfig
from tests.inference.tokenizers import save_micro_target, tiny_tokenizer
from tests.models import random_model
from tests.train import launch
from tests.train.micro_run import prepare, settings
from train.distributed import World
from train.run import train
from train.tracking.tracker import LOG_FILE, read_log

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "decoder_sparse_step": 1,
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2": {"tie_word_embeddings": True},
}


def save_family(folder: Path, family: str, donor: Path) -> Path:
    """A random model of `family` with the micro target's tokenizer."""
    shutil.copytree(
        donor,
        folder,
        ignore=shutil.ignore_patterns("*.safetensors", "config.json", "generation_config.json"),
    )
    plain = json.loads((donor / "config.json").read_text(encoding="utf-8"))
    tokens = {name: plain[name] for name in ("vocab_size", "eos_token_id", "bos_token_id")}
    torch.manual_seed(7)
    config = AutoConfig.for_model(family, **{**SIZES, **tokens, **FAMILIES[family]})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def test_every_process_sees_what_it_would_see_with_a_whole_target(tmp_path: Path) -> None:
    donor = save_micro_target(tmp_path / "llama")
    folders = [donor, *(save_family(tmp_path / family, family, donor) for family in FAMILIES)]
    output = launch.run(2, "tests.train.sharding_worker", "float32", *folders)
    assert output.count(": same;") == 2 * len(folders)


def test_buffers_that_loading_keeps_in_float32_reach_every_process(tmp_path: Path) -> None:
    """The routers of DeepSeek-V3 and its relatives have one, in a model of bfloat16."""
    model = random_model("deepseek_v3").to(torch.bfloat16)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.data = torch.linspace(0.1, 0.4, buffer.numel())
    model.save_pretrained(tmp_path / "target")
    tiny_tokenizer("chatml").save_pretrained(tmp_path / "target")
    output = launch.run(2, "tests.train.sharding_worker", "bfloat16", tmp_path / "target")
    assert output.count(": same;") == 2


def losses(out: Path) -> list[dict[str, Any]]:
    return [
        {
            name: line[name]
            for name in ("step", "loss", "grad_norm", "tau", "accuracy/depth1")
            if name in line
        }
        for line in read_log(out / LOG_FILE)
    ]


@pytest.mark.slow  # a plain one: tests/train/test_scale.py
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_a_training_on_a_divided_target_has_the_same_curve_and_tau(
    tmp_path: Path, family: str
) -> None:
    folder = prepare(tmp_path / "micro")
    if family != "llama":
        (folder / "target").rename(folder / "donor")
        save_family(folder / "target", family, folder / "donor")
        rebind(folder)
    changes: dict[str, Any] = {
        "kind": "eagle3",
        "head": {"ttt_steps": 2},
        "max_steps": 4,
        "eval_every": 2,
    }
    train(out=tmp_path / "whole", **settings(folder, **changes))
    divided = {**changes, "engine": {"target_sharding": "zero3"}}
    pairs = [f"{key}={json.dumps(value)}" for key, value in divided.items()]
    launch.run(2, "tests.train.micro_run", folder, tmp_path / "divided", *pairs)
    one, other = losses(tmp_path / "whole"), losses(tmp_path / "divided")
    assert [line["step"] for line in one] == [line["step"] for line in other]
    for a, b in zip(one, other, strict=True):
        assert b == pytest.approx(a, rel=2e-5), (a, b)
    assert any("tau" in line for line in one)


def rebind(folder: Path) -> None:
    """Let the answers be those of the target that now lies in `folder`: only its description is
    checked."""
    from inference.target.model import TargetModel

    path = folder / "answers" / "manifest.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    content["target"] = TargetModel.load(TargetConfig(str(folder / "target"))).info.to_dict()
    path.write_text(json.dumps(content), encoding="utf-8")


def test_one_process_holds_it_whole(micro: Path, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"max_steps": 2, "eval_every": 0}
    train(out=tmp_path / "a", **settings(micro, **changes))
    train(out=tmp_path / "b", **settings(micro, **changes, engine={"target_sharding": "zero3"}))
    assert losses(tmp_path / "a") == losses(tmp_path / "b")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"joint": {"mode": "lora"}, "kind": "medusa"},
            "joint training changes the target's own weights",
        ),
        ({"on_policy": {"share": 0.5}}, "a different number of times in every process"),
        ({"quantization": "bnb-8bit"}, "packed weights cannot be divided"),
        ({"compile": True}, "a compiled pass holds no messages"),
        ({"tensor_parallel": True, "engine": {}}, "in training every process has rows of its own"),
    ],
)
def test_what_does_not_go_with_it_is_refused(
    micro: Path, changes: dict[str, Any], message: str
) -> None:
    from dataclasses import replace

    from train.config import TrainingJob
    from train.on_policy import OnPolicyConfig
    from train.target.sharding import load_target

    changes = {"engine": {"target_sharding": "zero3"}, **changes}
    target = {
        name: changes.pop(name) for name in ("quantization", "tensor_parallel") if name in changes
    }
    if "on_policy" in changes:
        changes["on_policy"] = OnPolicyConfig(**changes["on_policy"])
    compiled = changes.pop("compile", False)
    job = TrainingJob(**settings(micro, **changes), out=micro)
    job = replace(job, decode=replace(job.decode, compile=compiled))
    with pytest.raises(UserError, match=message):
        load_target(replace(job, target=replace(job.target, **target)), World())
