"""Small language models: ordinary Hugging Face checkpoints (Llama, Qwen2 or Qwen3), with the target's vocabulary and tokenizer.

Engines draft with them as they are (`draft_model`), transformers as `assistant_model`. A PARD drafter is one that names its mask
token. What is shared with the target is written out, since a language model of its own has to be whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from heads.api.errors import UserError
from heads.nn.blocks import LayerShape
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
    followed_rope,
    layer_rows,
    plain_rope,
    read_rope,
    read_shape,
)

FAMILIES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
READABLE = (*FAMILIES, "mistral")
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
DEPTH = 4
"""Drafts per step of a distilled drafter when nothing says otherwise."""


def rows(shape: LayerShape, layers: int, vocabulary: int, *, embedding: bool, head: bool) -> list[Row]:
    """The tensors of a small language model; embedding, head: whether it has these of its own."""
    hidden = shape.hidden_size
    found = [Row("model.norm.weight", "model.norm.weight", (hidden,))]
    if embedding:
        found.append(Row(EMBEDDING, EMBEDDING, (vocabulary, hidden)))
    if head:
        found.append(Row(HEAD, HEAD, (vocabulary, hidden)))
    for index in range(layers):
        found += layer_rows(f"model.layers.{index}.", f"model.layers.{index}.", shape)
    return found


def write(checkpoint: Checkpoint, target: Target, options: Options, engine: str) -> Written:
    """The folder of a distilled or PARD drafter: a model that any of the engines, and transformers, loads by itself."""
    drafter: Any = checkpoint.drafter
    config, info, shape = drafter.config, checkpoint.info, drafter.shape
    pard, shared = checkpoint.kind == "pard", config.share_embeddings
    if pard and engine == "sglang":
        raise refuse(
            "its standalone drafters are autoregressive, without mask tokens", "SGLang", "Serve it with vLLM."
        )
    if pard and engine == "transformers":
        raise refuse(
            "assisted generation asks its assistant for one token at a time, and a PARD drafter's later tokens need mask tokens",
            "transformers", "Serve it with vLLM, or train head=distilled.",
        )  # fmt: skip
    ours, layers = checkpoint.tensors, len(drafter.model.layers)
    table = rows(
        shape, layers, info.vocab_size, embedding=not shared, head=not shared and not config.tie_embeddings
    )
    tensors = give(table, ours, left=("pard_token",))
    dtype = tensors["model.norm.weight"].dtype
    notes = []
    tied = config.tie_embeddings
    if shared:
        weights = target.weights
        tied = weights.lm_head is weights.embedding
        tensors[EMBEDDING] = weights.embedding.to(dtype)
        if not tied:
            tensors[HEAD] = weights.lm_head.to(dtype)
        notes.append("embedding and LM head are copies of the target's")
    family = "qwen3" if shape.qk_norm else "qwen2" if shape.attention_bias else "llama"
    if shape.qk_norm and shape.attention_bias:  # Qwen3's bias is on the output as well
        for index in range(layers):
            tensors[f"model.layers.{index}.self_attn.o_proj.bias"] = torch.zeros(
                shape.hidden_size, dtype=dtype
            )
    described = {
        "architectures": [FAMILIES[family]],
        "model_type": family,
        **block_config(shape, info, layers, rope_of(checkpoint, target)),
        "tie_word_embeddings": bool(tied),
        **special_tokens(target),
    }
    if family != "llama":
        described["use_sliding_window"] = False
    speculative: dict[str, Any] = {"method": "draft_model", "num_speculative_tokens": options.tokens or DEPTH}
    if pard:
        described["pard_token"] = int(ours["pard_token"])
        speculative |= {"num_speculative_tokens": options.tokens or config.depth, "parallel_drafting": True}
    return Written(described, tensors, speculative, notes=notes, tokenizer=True)


def rope_of(checkpoint: Checkpoint, target: Target) -> dict[str, Any]:
    """The rotary parameters: the target's where its layers were copied, otherwise the drafter's own."""
    drafter: Any = checkpoint.drafter
    config = drafter.config
    theta = config.rope_theta or checkpoint.info.rope_theta
    if config.from_target_layers:
        return followed_rope(target, drafter.shape.head_dim, theta)
    if not config.rope_scaling:
        return plain_rope(theta)
    scaling: dict[str, Any] = dict(zip(SCALING, config.rope_scaling, strict=True))
    scaling[SCALING[-1]] = int(scaling[SCALING[-1]])
    return {"rope_type": "llama3", "rope_theta": theta, **scaling}


def special_tokens(target: Target) -> dict[str, Any]:
    """The ids of begin, end and padding, as the target has them."""
    found = {
        name: getattr(target.described, name, None)
        for name in ("bos_token_id", "eos_token_id", "pad_token_id")
    }
    return {name: value for name, value in found.items() if value is not None}


def matches(folder: Folder) -> bool:
    """Whether a folder is a language model of a family that can be a drafter."""
    return EMBEDDING in folder.tensors and folder.config.get("model_type") in READABLE


def read(folder: Folder, receiver: Receiver) -> Imported:
    """A distilled (or PARD) drafter from a causal language model with the target's vocabulary, padded or trimmed to its size."""
    config, where, size = folder.config, str(folder.path), receiver.info.vocab_size
    odd = [name for name in ("mlp_bias", "use_sliding_window") if config.get(name)]
    if config.get("model_type") == "mistral" and config.get("sliding_window"):
        odd.append("sliding_window")
    if odd or str(config.get("hidden_act", "silu")) != "silu":
        raise UserError(
            f"'{where}' has {', '.join(odd) or 'another activation'}, which our drafters do not have."
        )
    theirs, notes = dict(folder.tensors), []
    shape = read_shape(config, where)
    family = config["model_type"]
    layers = int(config["num_hidden_layers"])
    bias = family == "qwen2" or bool(config.get("attention_bias"))
    for index in range(layers):
        extra = theirs.pop(f"model.layers.{index}.self_attn.o_proj.bias", None)
        if extra is not None and bool(extra.any()):
            raise UserError(
                f"'{where}' has a bias on the output of its attention, which our drafters do not have."
            )
    shape = replace(shape, qk_norm=family == "qwen3", attention_bias=bias)
    tied = bool(config.get("tie_word_embeddings", False)) or HEAD not in theirs
    if tied:
        theirs.pop(HEAD, None)
    for name in (EMBEDDING, HEAD):
        if name in theirs and theirs[name].shape[0] != size:
            done = "padded" if theirs[name].shape[0] < size else "trimmed"
            notes.append(f"{name}: {theirs[name].shape[0]} rows, {done} to {size}")
            theirs[name] = fitted(theirs[name], size)
    found = take(rows(shape, layers, size, embedding=True, head=not tied), theirs, where)
    values = network(config, shape, layers, receiver)
    values["tie_embeddings"] = tied
    token = config.get("pard_token")
    if token is None:
        return Imported("distilled", values, found, notes)
    values["pard_token"] = int(token)
    return Imported("pard", values, found | {"pard_token": torch.tensor(int(token))}, notes)


def network(config: Mapping[str, Any], shape: LayerShape, layers: int, receiver: Receiver) -> dict[str, Any]:
    """The values of a `NetworkConfig` for a language model of these sizes; raises `UserError` for rotary scalings we lack."""
    rope = read_rope(config)
    if (
        rope["rope_type"] not in ("default", "llama3")
        or float(rope.get("partial_rotary_factor") or 1.0) != 1.0
    ):
        raise UserError(
            f"rotary positions of type '{rope['rope_type']}' cannot be a drafter's: allowed are default and llama3."
        )
    values: dict[str, Any] = {
        "num_layers": layers,
        "hidden_size": shape.hidden_size,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate_size,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": float(rope["rope_theta"]),
        "qk_norm": shape.qk_norm,
        "attention_bias": shape.attention_bias,
    }
    if rope["rope_type"] == "llama3":
        values["rope_scaling"] = [float(rope[name]) for name in SCALING]
    return values


def fitted(rows_: Tensor, size: int) -> Tensor:
    """Rows [V', H] as [V, H]: padded with zeros or trimmed."""
    found = torch.zeros(size, rows_.shape[1], dtype=rows_.dtype)
    count = min(size, rows_.shape[0])
    found[:count] = rows_[:count]
    return found
