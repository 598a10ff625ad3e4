"""Drafters in GGUF, for llama.cpp: metadata and names of tensors.

Language models are llama.cpp's `llama`, `qwen2` and `qwen3`; EAGLE-3 is `eagle3`, DFlash and DSpark
are `dflash`. The files contain what llama.cpp's converter makes of the engines' folders: queries
and keys of Llama layers (EAGLE-3's too) with the two halves of every head interleaved, llama3's
rotary scaling as one divisor per frequency, target ids instead of offsets in `d2t`, layers of the
target numbered by their input (the state after L layers is the input of layer L). Embedding and LM
head of EAGLE-3, DFlash and DSpark are the target's unless the drafter has its own.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from heads.nn import vocab
from inference.export.config import ExportConfig
from inference.export.hub.private import last_part
from inference.export.layouts import base, causal, dflash, eagle3, llama
from inference.export.layouts.base import Checkpoint, Target, Written
from inference.export.layouts.folder import EMBEDDING, HEAD, Json
from inference.hub.config import REPO_NAME

FILE = "drafter.gguf"
ENGINE = "llama.cpp"
EAGLE3, DFLASH = "eagle3", "dflash"
TAPS = 3
"""The number of layers that llama.cpp's EAGLE-3 reads."""
LAYER = re.compile(r"(?:model\.)?(?:layers\.(\d+)|midlayer)\.(.+)")
IN_LAYER = {
    "input_layernorm": "attn_norm",
    "hidden_norm": "attn_norm_2",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
OUTSIDE = {
    "model.embed_tokens": "token_embd",
    "embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "norm": "output_norm",
    "lm_head": "output",
    "fc": "fc",
    "hidden_norm": "enc.output_norm",
    "input_norm": "enc.output_norm",
    "markov_head.markov_w1": "markov_w1",
    "markov_head.markov_w2": "markov_w2",
    "confidence_head.proj": "conf_proj",
}
"""Names of modules in Hugging Face's layout and in GGUF."""
FREQUENCIES = "rope_freqs.weight"


def write(checkpoint: Checkpoint, target: Target, options: ExportConfig) -> Written:
    """The file of a distilled, EAGLE-3, DFlash or DSpark drafter; raises `UserError` for features
    that llama.cpp lacks."""
    method, layers = checkpoint.method, checkpoint.info.num_layers
    if reason := base.without_last(checkpoint.drafter.needs.taps, layers, ENGINE):
        raise _refuse(reason, f"head.taps below {layers}")
    if method == "distilled":
        found = causal.write(checkpoint, target, options)
        architecture = str(found.config["model_type"])
        if architecture == "qwen3" and found.config["attention_bias"]:
            raise _refuse("its Qwen3 layers have no biases", "head.attention_bias=false")
    elif method == EAGLE3:
        found, architecture = eagle3.write(checkpoint, target, options), EAGLE3
        require_eagle3(found.config)
    else:
        found, architecture = dflash.write(checkpoint, target, options), DFLASH
        own_vocabulary(checkpoint, found, target)
        leave_scale(found)
    interleaved = architecture in ("llama", EAGLE3)
    rope = found.config["rope_parameters"]
    if rope["rope_type"] == "llama3" and architecture.startswith("qwen"):
        raise _refuse("its Qwen layers have no llama3 scaling", "head.rope_scaling=[]")
    shape = llama.read_shape(found.config, checkpoint.folder)
    heads = {"q_proj": shape.num_attention_heads, "k_proj": shape.num_key_value_heads}
    tensors = {}
    for name, value in found.tensors.items():
        if name == "t2d":
            continue
        last = name.split(".")[-2] if "." in name else ""
        if name == "d2t":
            tensors[name] = vocab.to_target_ids(value)
        else:
            turned = interleaved and last in heads
            tensors[gguf_name(name)] = interleave(value, heads[last]) if turned else value
    if rope["rope_type"] == "llama3":
        tensors[FREQUENCIES] = frequency_divisors(rope, shape.head_dim)
    keys = metadata(architecture, checkpoint, found)
    return replace(
        found, config=keys, tensors=tensors, files={}, tokenizer=False, described="", weights=FILE
    )


def _refuse(what: str, train: str) -> Exception:
    return base.refuse(what, ENGINE, f"Train with {train}, or serve it with vLLM.")


def require_eagle3(config: Json) -> None:
    """Raise `UserError` for options of EAGLE-3 that llama.cpp's graph does not have."""
    refusals = (
        (config["fc_norm"], "its EAGLE-3 has no norm per tapped layer", "head.tap_norm=false"),
        (
            config["norm_output"],
            "its EAGLE-3 passes on the state before the last norm",
            "head.post_norm_recurrence=false",
        ),
        (
            config["model_type"] != "llama",
            "its EAGLE-3 has no query and key norms",
            "head.qk_norm=false",
        ),
        (
            config["num_aux_hidden_states"] != TAPS,
            f"its EAGLE-3 reads {TAPS} layers of the target",
            f"{TAPS} layers in head.taps",
        ),
    )
    for applies, what, train in refusals:
        if applies:
            raise _refuse(what, train)


def own_vocabulary(checkpoint: Checkpoint, found: Written, target: Target) -> None:
    """Put a learned mask vector into a copy of the target's embedding, and add the target's LM
    head. With an embedding and no head in the file, llama.cpp would draft with the embedding."""
    mask = checkpoint.tensors.get("mask_embedding")
    if mask is None or checkpoint.config.mask_token_id >= 0:
        return
    embedding = target.weights.embedding.to(mask.dtype).clone()
    embedding[mask_token(found.config)] = mask
    found.tensors[EMBEDDING] = embedding
    found.tensors[HEAD] = target.weights.lm_head.to(mask.dtype)


def leave_scale(found: Written) -> None:
    """Note that llama.cpp adds a Markov table to logits without the target's scale: it reads
    `dflash.logit_scale`, and applies it in DFlash 2 alone."""
    scale = found.config.get("logit_scale")
    if scale is not None:
        found.notes.append(dflash.left_out([f"scale ({scale:g})"]))


def mask_token(config: Json) -> int:
    """The token of a block's empty slots."""
    return int((config.get("dflash_config") or config)["mask_token_id"])


def gguf_name(name: str) -> str:
    """A tensor's name in GGUF; raises `KeyError` for a tensor that has none."""
    module, _, end = name.rpartition(".")
    inside = LAYER.fullmatch(module)
    if inside:
        return f"blk.{inside[1] or 0}.{IN_LAYER[inside[2]]}.{end}"
    return f"{OUTSIDE[module]}.{end}"


def interleave(weight: Tensor, heads: int) -> Tensor:
    """Rows of queries or keys [heads x D, ...] in the order of rotation by neighbouring pairs: row
    2 i + j of a head is its row j D / 2 + i."""
    halves = weight.reshape(heads, 2, -1, *weight.shape[1:])
    return halves.transpose(1, 2).reshape(weight.shape)


def frequency_divisors(rope: Json, head_dim: int) -> Tensor:
    """The divisors of the head_dim / 2 frequencies in llama3's scaling."""
    original = float(rope["original_max_position_embeddings"])
    low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    factor, found = float(rope["factor"]), []
    for pair in range(head_dim // 2):
        turns = original / (2 * math.pi * float(rope["rope_theta"]) ** (2 * pair / head_dim))
        share = min(max((turns - low) / (high - low), 0.0), 1.0)
        found.append(1.0 / ((1.0 - share) / factor + share))
    return torch.tensor(found, dtype=torch.float32)


def metadata(architecture: str, checkpoint: Checkpoint, found: Written) -> Json:
    """A file's keys, except the tokenizer's."""
    config, info = found.config, checkpoint.info
    shape = llama.read_shape(config, checkpoint.folder)
    rope = config["rope_parameters"]
    keys: Json = {
        "general.architecture": architecture,
        "general.type": "model",
        "general.name": f"{checkpoint.method} drafter for {public_name(info.id)}",
    }
    own: Json = {
        "block_count": int(config["num_hidden_layers"]),
        "context_length": info.max_position_embeddings,
        "embedding_length": shape.hidden_size,
        "feed_forward_length": shape.intermediate_size,
        "attention.head_count": shape.num_attention_heads,
        "attention.head_count_kv": shape.num_key_value_heads,
        "attention.key_length": shape.head_dim,
        "attention.value_length": shape.head_dim,
        "attention.layer_norm_rms_epsilon": float(shape.rms_norm_eps),
        "rope.dimension_count": shape.head_dim,
        "rope.freq_base": float(rope["rope_theta"]),
        "vocab_size": info.vocab_size,
        **scaling(rope),
    }
    if architecture == EAGLE3:
        own |= {
            "target_layers": list(checkpoint.drafter.needs.taps),
            "target_hidden_size": info.hidden_size,
            "norm_before_residual": bool(config["norm_before_residual"]),
            "norm_before_fc": bool(config["norm_before_fc"]),
        }
    elif architecture == DFLASH:
        inner = config.get("dflash_config") or config
        own |= {
            "target_layers": list(checkpoint.drafter.needs.taps),
            "block_size": int(config["block_size"]),
            "attention.causal": bool(inner.get("causal", config.get("is_causal"))),
        }
        keys["tokenizer.ggml.mask_token_id"] = mask_token(config)
    if checkpoint.method == "dspark":
        own |= {
            "sample_from_anchor": bool(config["sample_from_anchor"]),
            "has_confidence_head": bool(config["enable_confidence_head"]),
        }
    return keys | {f"{architecture}.{name}": value for name, value in own.items()}


def public_name(target: str) -> str:
    """A target's Hub id, or the last part of its path: files may be published as they are."""
    is_id = REPO_NAME.fullmatch(target) and not Path(target).exists()
    return target if is_id else last_part(target)


def scaling(rope: Json) -> Json:
    """The keys of linear and yarn scaling."""
    if rope["rope_type"] == "linear":
        return {"rope.scaling.type": "linear", "rope.scaling.factor": float(rope["factor"])}
    if rope["rope_type"] != "yarn":
        return {}
    named = {
        "extrapolation_factor": "yarn_ext_factor",
        "attention_factor": "yarn_attn_factor",
        "beta_fast": "yarn_beta_fast",
        "beta_slow": "yarn_beta_slow",
    }
    return {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": float(rope["factor"]),
        "rope.scaling.original_context_length": int(rope["original_max_position_embeddings"]),
        **{
            f"rope.scaling.{theirs}": float(rope[ours])
            for ours, theirs in named.items()
            if rope.get(ours) is not None
        },
    }
