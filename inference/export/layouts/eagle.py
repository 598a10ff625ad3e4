"""EAGLE-1 and -2: one Llama layer without a first norm, behind a projection of (token, state).

vLLM builds `fc` without a bias and refuses a file that has one. SGLang always builds one and leaves
it random unless the file sets it, so the folder for SGLang contains zeros. Embedding and LM head
are the target's. EAGLE-2 has the same weights and another tree.
"""

from __future__ import annotations

import torch

from heads.api.errors import UserError
from heads.api.target_info import TargetInfo
from heads.nn.blocks import LayerShape
from heads.nn.feature.base import layer_shape
from inference.export.config import ExportConfig
from inference.export.layouts import base, llama
from inference.export.layouts.base import Checkpoint, Imported, Target, Written
from inference.export.layouts.folder import EMBEDDING, HEAD, Folder, Receiver

ARCHITECTURES = {"vllm": "LlamaForCausalLM", "sglang": "LlamaForCausalLMEagle"}
OTHER_FIRST_NORMS = (
    "layers.0.input_layernorm.weight",
    "layers.0.hidden_norm.weight",
    "midlayer.hidden_norm.weight",
    "norm.weight",
)
"""Tensors that other drafters with an `fc` have and EAGLE-1 lacks."""


def rows(shape: LayerShape, info: TargetInfo, bias: bool) -> list[base.TensorRow]:
    """The tensors of an EAGLE-1 drafter; bias: whether `fc` has one."""
    return base.own_rows("eagle", {**llama.sizes_config(shape, info), "fc_bias": bias}, info)


def expect(folder: Folder, info: TargetInfo) -> base.Expected:
    """See `Layout.tensors`."""
    shape = llama.read_shape(folder.flat, folder.path)
    table = rows(shape, info, folder.architecture == ARCHITECTURES["sglang"])
    return table, {EMBEDDING: (info.vocab_size, info.hidden_size)}


LAYOUT = base.Layout(
    "eagle",
    (*ARCHITECTURES.values(), "EagleLlamaForCausalLM"),
    expect,
    linear=rf"fc|{llama.LINEAR}",
)


def write(checkpoint: Checkpoint, target: Target, options: ExportConfig) -> Written:
    """The folder for vLLM or SGLang."""
    config, info, sglang = checkpoint.config, checkpoint.info, options.engine == "sglang"
    shape, bias = layer_shape(config, info), bool(config.fc_bias)
    if bias and not sglang:
        instead = "Train with head.fc_bias=false, or serve it with SGLang."
        raise base.refuse("its projection `fc` has a bias", "vLLM", instead)
    tensors = dict(checkpoint.tensors)
    if sglang and not bias:
        tensors["fc.bias"] = torch.zeros(shape.hidden_size, dtype=tensors["fc.weight"].dtype)
    described = {
        "architectures": [ARCHITECTURES[options.engine]],
        "model_type": "llama",
        **llama.block_config(shape, info, 1, base.own_rope(checkpoint, target)),
        "bias": sglang,
    }
    tokens = options.tokens or max(base.CHAIN, config.align_steps)
    return Written(described, tensors, {"method": "eagle", "num_speculative_tokens": tokens})


def matches(folder: Folder) -> bool:
    """Whether a folder is EAGLE-1: an `fc` in front of a single layer without a first norm."""
    names = set(folder.tensors)
    needed = {"fc.weight", "layers.0.mlp.up_proj.weight"}
    return needed <= names and names.isdisjoint(OTHER_FIRST_NORMS)


def read(folder: Folder, receiver: Receiver) -> Imported:
    """Our checkpoint from their folder; an `fc.bias` of zeros is dropped."""
    config, where = folder.config, folder.path
    shape = llama.read_shape(config, where)
    llama.require_fit(shape, config, receiver.info, where)
    if int(config.get("num_hidden_layers", 1)) != 1:
        raise UserError(f"'{where}' has {config['num_hidden_layers']} layers; our eagle has one.")
    tensors = dict(folder.tensors)
    for name in (EMBEDDING, HEAD):
        receiver.drop_shared(name, tensors, where)
    bias = "fc.bias" in tensors and bool(tensors["fc.bias"].any())
    found = base.take(rows(shape, receiver.info, bias), tensors, where, spare=("fc.bias",))
    values = llama.sizes_config(shape, receiver.info) | ({"fc_bias": True} if bias else {})
    return Imported("eagle", values, found)
