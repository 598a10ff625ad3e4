"""Folders of drafters as other trainers write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from heads.api.checkpoint import new_drafter
from heads.api.registry import get_kind
from inference.export.layouts.folder import Folder
from inference.target.model import TargetModel


def sizes(target: TargetModel, **more: Any) -> dict[str, Any]:
    """config.json of a Llama layer that fits the target, in the spelling of transformers 4."""
    info = target.info
    return {
        "hidden_size": info.hidden_size,
        "intermediate_size": info.intermediate_size,
        "num_attention_heads": info.num_attention_heads,
        "num_key_value_heads": info.num_key_value_heads,
        "head_dim": info.head_dim,
        "rms_norm_eps": info.rms_norm_eps,
        "rope_theta": info.rope_theta,
        "vocab_size": info.vocab_size,
        "max_position_embeddings": info.max_position_embeddings,
        "hidden_act": "silu",
        "num_hidden_layers": 1,
        "model_type": "llama",
        **more,
    }


def folder_of(
    path: Path, config: dict[str, Any], found: dict[str, Tensor], file: str = "model.safetensors"
) -> Folder:
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config))
    plain = {name: value.detach().clone().contiguous() for name, value in found.items()}
    if file.endswith(".safetensors"):
        save_file(plain, path / file)
    else:
        torch.save(plain, path / file)
    return Folder.read(path)


def specforge_eagle3(target: TargetModel, path: Path, draft_vocab: int = 1000) -> Folder:
    """An EAGLE-3 head in SpecForge's layout: its layer ids, its names, no t2d."""
    layers = target.info.num_layers
    taps = (2, layers // 2, layers - 3)
    config = get_kind("eagle3").config_class(
        taps=taps, tap_norm=False, post_norm_recurrence=False, draft_vocab_size=draft_vocab
    )
    counts = torch.arange(target.info.vocab_size).flip(0) % 7
    drafter = new_drafter("eagle3", config, target.info, target.weights, 1, counts)
    written = sizes(
        target,
        architectures=["LlamaForCausalLMEagle3"],
        draft_vocab_size=draft_vocab,
        eagle_config={
            "eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in taps],
            "use_aux_hidden_state": True,
        },
    )
    tensors = {name: value for name, value in drafter.state_dict().items() if name != "t2d"}
    return folder_of(path, written, tensors)
