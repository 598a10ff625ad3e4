"""Multi-token prediction: MiMo's block, which vLLM and SGLang run with any dense target.

Engines load other MTP blocks only for targets of the block's own family, from the target's
checkpoint. MiMo's block is built like ours (two norms, a projection, one decoder layer, a final
norm, the target's embedding and LM head), and its folder may contain nothing else. So the block is
exported as a separate folder, which is given beside the target. Its projection reads the state
first, ours the token first; its layer is Qwen2's, whose biases are zeros here. It blanks the token
of the first position, which ours reads; with a text's usual first token this changes one row of the
block's cache. vLLM takes the block's sizes, and the number of blocks, from the target's
configuration: the layer must have the target's sizes, and the number is given with --hf-overrides.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from heads.api.errors import UserError
from heads.api.target_info import TargetInfo
from heads.nn.blocks import LayerShape
from heads.nn.feature.base import layer_shape
from inference.export.config import ExportConfig
from inference.export.layouts import base, llama
from inference.export.layouts.base import Checkpoint, Imported, Shapes, Target, TensorRow, Written
from inference.export.layouts.folder import Folder, Json, Receiver

PREFIX = "model.mtp_layers.0."
NAMES = {
    "fc.weight": "input_proj.weight",
    "pre_fc_norm_embedding.weight": "token_layernorm.weight",
    "pre_fc_norm_hidden.weight": "hidden_layernorm.weight",
    "norm.weight": "final_layernorm.weight",
}
PROJECTION = PREFIX + NAMES["fc.weight"]
SPECULATORS = "mtp_layers.0.input_proj.weight"
"""The projection in the library speculators, which reads the token first."""
SIZES = ("hidden_size", "intermediate_size", *llama.HEADS)


def rows(shape: LayerShape, info: TargetInfo) -> list[TensorRow]:
    """The tensors of the block, with the halves of the projection in our order."""
    table = base.own_rows("mtp", {"shared": True, **llama.sizes_config(shape, info)}, info)
    names = [row.ours.removeprefix("mtp.").removeprefix("layers.0.") for row in table]
    theirs = [PREFIX + NAMES.get(name, name) for name in names]
    return [replace(row, theirs=name) for row, name in zip(table, theirs, strict=True)]


def swap_halves(projection: Tensor) -> Tensor:
    """A projection [H, 2H] of (token, state) as one of (state, token), and back."""
    return torch.cat(projection.chunk(2, 1)[::-1], 1).contiguous()


def biases(shape: LayerShape) -> Shapes:
    """The biases of Qwen2's attention, which ours does not have."""
    query, value = shape.num_attention_heads, shape.num_key_value_heads
    counts = {"q": query, "k": value, "v": value}
    name = PREFIX + "self_attn.{}_proj.bias"
    return {name.format(part): (count * shape.head_dim,) for part, count in counts.items()}


def expect(folder: Folder, info: TargetInfo) -> base.Expected:
    """See `Layout.tensors`."""
    shape = llama.read_shape({**folder.flat, "attention_bias": False}, folder.path)
    return rows(shape, info) + base.same_names(biases(shape)), {}


LAYOUT = base.Layout("mtp-mimo", ("MiMoForCausalLM",), expect, silent=True)


def write(checkpoint: Checkpoint, target: Target, options: ExportConfig) -> Written:
    """The folder for vLLM and SGLang."""
    config, info, vllm = checkpoint.config, checkpoint.info, options.engine == "vllm"
    if not config.shared:
        what = "engines recurse one block, and it has a block per depth"
        instead = "Train with head.shared=true (head=fastmtp)."
        raise base.refuse(what, "vLLM" if vllm else "SGLang", instead)
    shape = layer_shape(config, info)
    if shape.head_dim * shape.num_attention_heads != shape.hidden_size:
        raise base.refuse(
            f"its heads are {shape.head_dim} wide, and MiMo's layer divides the hidden size by the "
            "number of heads",
            "an engine",
            f"Train with head.head_dim={shape.hidden_size // shape.num_attention_heads}.",
        )
    sizes = {name: (getattr(shape, name), getattr(info, name)) for name in SIZES}
    wrong = [f"{name} {own} instead of {its}" for name, (own, its) in sizes.items() if own != its]
    if vllm and wrong:
        what = f"its layer is not built like the target's ({', '.join(wrong)})"
        raise base.refuse(what, "vLLM", "Train with the target's own sizes (0).")
    rope = target.rope
    if vllm and (rope.get("rope_type", "default") != "default" or llama.is_partial(rope)):
        what = "it rotates the layer as the target's, whose scaling the drafter was trained without"
        raise base.refuse(what, "vLLM", "Export for sglang, or train head=eagle3.")
    tensors = base.give(rows(shape, info), checkpoint.tensors)
    tensors[PROJECTION] = swap_halves(tensors[PROJECTION])
    dtype = tensors[PROJECTION].dtype
    tensors |= {name: torch.zeros(size, dtype=dtype) for name, size in biases(shape).items()}
    described = {
        "architectures": ["MiMoForCausalLM"],
        "model_type": "qwen2",
        **llama.block_config(shape, info, 1, base.own_rope(checkpoint, target)),
        "num_nextn_predict_layers": 1,
        "use_sliding_window": False,
    }
    speculative = {"method": "mtp", "num_speculative_tokens": options.tokens or config.depths}
    note = (
        "the engine blanks the token at position 0, which the drafter was trained with: one row of "
        "its cache differs"
    )
    return Written(described, tensors, speculative, notes=[note])


def matches(folder: Folder) -> bool:
    """Whether a folder holds an MTP block in MiMo's layout, or in speculators'."""
    return PROJECTION in folder.tensors or SPECULATORS in folder.tensors


def read(folder: Folder, receiver: Receiver) -> Imported:
    """Our checkpoint (one recursed block) from MiMo's layout, or from speculators'."""
    where, info = folder.path, receiver.info
    config: Json = folder.config.get("transformer_layer_config", folder.config)
    token_first = SPECULATORS in folder.tensors
    theirs = {
        f"model.{name}" if token_first and name.startswith("mtp_layers") else name: value
        for name, value in folder.tensors.items()
    }
    if any("mtp_layers" in name and not name.startswith(PREFIX) for name in theirs):
        raise UserError(f"'{where}' holds several MTP blocks; ours of this form has one.")
    # The block may have been stitched into the target; the target's own weights are left out.
    theirs = {name: value for name, value in theirs.items() if name.startswith(PREFIX)}
    if any(name.endswith(("q_norm.weight", "k_norm.weight")) for name in theirs):
        raise UserError(f"'{where}' has norms on query and key heads, which our MTP blocks lack.")
    shape = llama.read_shape({**config, "attention_bias": False}, where)
    llama.require_fit(shape, config, info, where)
    spare = [theirs.pop(name) for name in biases(shape) if name in theirs]
    if any(bool(bias.any()) for bias in spare):
        raise UserError(f"'{where}' has biases on its attention, which our MTP blocks lack.")
    found = base.take(rows(shape, info), theirs, where)
    if not token_first:
        found["mtp.fc.weight"] = swap_halves(found["mtp.fc.weight"])
    return Imported("mtp", {"shared": True, **llama.sizes_config(shape, info)}, found)
