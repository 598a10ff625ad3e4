"""EAGLE-1 and -2 as engines and the authors lay it out: one Llama layer without a first norm, under its own names.

vLLM builds `fc` without a bias and refuses a file that has one; SGLang always builds one and leaves it random unless the file sets
it, so its folder holds zeros there. Embedding and LM head are the target's. EAGLE-2 is the same weights with another tree.
"""

from __future__ import annotations

from typing import Any

import torch

from heads.api.errors import UserError
from heads.nn.blocks import LayerShape
from heads.nn.feature.base import layer_shape
from inference.export.layouts.base import (
    Checkpoint,
    Imported,
    Options,
    Row,
    Target,
    Written,
    give,
    refuse,
    take,
)
from inference.export.layouts.folder import Folder, Receiver
from inference.export.layouts.llama import (
    block_config,
    layer_rows,
    plain_rope,
    read_shape,
    require_fit,
    sizes_config,
)

ARCHITECTURES = {"vllm": "LlamaForCausalLM", "sglang": "LlamaForCausalLMEagle"}
DEPTH = 4
"""Drafts per step when nothing says otherwise."""


def rows(shape: LayerShape, bias: bool) -> list[Row]:
    """The tensors of an EAGLE-1 drafter; bias: whether `fc` has one."""
    hidden = shape.hidden_size
    found = [Row("fc.weight", "fc.weight", (hidden, 2 * hidden))]
    if bias:
        found.append(Row("fc.bias", "fc.bias", (hidden,)))
    return found + layer_rows("layers.0.", "layers.0.", shape, norms=("post_attention_layernorm",))


def has_bias(config: Any) -> bool:
    """Whether a configuration of ours has a bias on `fc`."""
    return bool(getattr(config, "fc_bias", False))


def write(checkpoint: Checkpoint, target: Target, options: Options, engine: str) -> Written:
    """The folder for `engine`."""
    shape, bias = layer_shape(checkpoint.config, checkpoint.info), has_bias(checkpoint.config)
    if engine == "vllm" and bias:
        raise refuse(
            "its projection `fc` has a bias",
            "vLLM",
            "Train with head.fc_bias=false, or serve it with SGLang.",
        )
    tensors = give(rows(shape, bias), checkpoint.tensors)
    if engine == "sglang" and not bias:
        tensors["fc.bias"] = torch.zeros(shape.hidden_size, dtype=tensors["fc.weight"].dtype)
    config = {
        "architectures": [ARCHITECTURES[engine]],
        "model_type": "llama",
        **block_config(shape, checkpoint.info, 1, plain_rope(checkpoint.info.rope_theta)),
        "bias": engine == "sglang",
    }
    tokens = options.tokens or max(DEPTH, checkpoint.config.align_steps)
    return Written(config, tensors, {"method": "eagle", "num_speculative_tokens": tokens})


def matches(folder: Folder) -> bool:
    """Whether a folder is EAGLE-1: an `fc` of two inputs in front of a single layer that has no first norm."""
    names = set(folder.tensors)
    return (
        "fc.weight" in names
        and "layers.0.mlp.up_proj.weight" in names
        and not (
            {
                "layers.0.input_layernorm.weight",
                "layers.0.hidden_norm.weight",
                "midlayer.hidden_norm.weight",
                "norm.weight",
            }
            & names
        )
    )


def read(folder: Folder, receiver: Receiver) -> Imported:
    """Our checkpoint from their folder; an `fc.bias` of zeros is none."""
    config, where = folder.config, str(folder.path)
    shape = read_shape(config, where)
    require_fit(shape, config, receiver.info, where)
    if int(config.get("num_hidden_layers", 1)) != 1:
        raise UserError(f"'{where}' has {config['num_hidden_layers']} layers; our eagle has one.")
    tensors, notes = receiver.without_shared(folder)
    bias = "fc.bias" in tensors and bool(tensors["fc.bias"].any())
    found = take(rows(shape, bias), tensors, where, spare=("fc.bias",))
    values: dict[str, Any] = {**sizes_config(shape, receiver.info)}
    if bias:
        values["fc_bias"] = True
    return Imported("eagle", values, found, notes)
