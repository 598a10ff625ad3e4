"""What layouts take from Hugging Face's Llama: a decoder layer's tensors and config.json's keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from heads.api.errors import UserError
from heads.api.target_info import TargetInfo
from heads.nn.blocks import LayerShape
from inference.export.layouts.base import Json, Shapes, Target, TensorRow

NORMS = ("input_layernorm", "post_attention_layernorm")
EXACT_ROPES = ("default", "linear", "llama3", "yarn")
"""Rotary scalings that engines compute as transformers does, for any length of the text."""


def layer_rows(
    ours: str, theirs: str, shape: LayerShape, width: int = 0, norms: tuple[str, ...] = NORMS
) -> list[TensorRow]:
    """The tensors of one decoder layer under two prefixes.

    Width: of the attention's input (default: hidden size).
    """
    hidden, size = shape.hidden_size, shape.head_dim
    query, value = shape.num_attention_heads * size, shape.num_key_value_heads * size
    wide, mlp = width or hidden, shape.intermediate_size
    shapes: Shapes = {
        "self_attn.q_proj.weight": (query, wide),
        "self_attn.k_proj.weight": (value, wide),
        "self_attn.v_proj.weight": (value, wide),
        "self_attn.o_proj.weight": (hidden, query),
        "mlp.gate_proj.weight": (mlp, hidden),
        "mlp.up_proj.weight": (mlp, hidden),
        "mlp.down_proj.weight": (hidden, mlp),
    }
    if shape.attention_bias:
        for name, rows in (("q", query), ("k", value), ("v", value)):
            shapes[f"self_attn.{name}_proj.bias"] = (rows,)
    if shape.qk_norm:
        shapes |= {f"self_attn.{name}_norm.weight": (size,) for name in "qk"}
    shapes |= {f"{name}.weight": (hidden,) for name in norms}
    return [TensorRow(ours + name, theirs + name, dims) for name, dims in shapes.items()]


def block_config(shape: LayerShape, info: TargetInfo, layers: int, rope: Mapping[str, Any]) -> Json:
    """The keys of config.json for decoder layers, in the spelling of both transformers 4 and 5."""
    described: Json = {
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": layers,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": shape.rms_norm_eps,
        "max_position_embeddings": info.max_position_embeddings,
        "vocab_size": info.vocab_size,
        "attention_bias": shape.attention_bias,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "initializer_range": 0.02,
        "use_cache": True,
        "rope_theta": float(rope["rope_theta"]),
        "rope_parameters": {"rope_type": "default", **rope},
    }
    if described["rope_parameters"]["rope_type"] != "default":
        scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
        described["rope_scaling"] = scaling
    return described


def plain_rope(theta: float) -> Json:
    """Rotary positions without scaling."""
    return {"rope_type": "default", "rope_theta": float(theta)}


def follow_rope(target: Target, head_dim: int, theta: float) -> Json:
    """The rotary parameters of a drafter that rotates as its target does.

    They are the target's if it has one set of them for heads of the same size, else `theta` alone.
    Raises `UserError` for scalings that change with the length of the text: the drafter was trained
    with fixed ones.
    """
    found, described = target.rope, target.described
    kind = str(found.get("rope_type", "default"))
    partial = float(found.get("partial_rotary_factor") or 1.0)
    size = (
        getattr(described, "head_dim", None)
        or described.hidden_size // described.num_attention_heads
    )
    if not found or partial != 1.0 or size != head_dim:
        return plain_rope(theta)
    if kind not in EXACT_ROPES:
        raise UserError(
            f"the target's rotary positions are of type '{kind}', which engines change with the "
            "length of the text, while this drafter was trained with fixed ones. It cannot be "
            f"exported; allowed are {', '.join(EXACT_ROPES)}."
        )
    known = {key: value for key, value in found.items() if value is not None}
    known.pop("partial_rotary_factor", None)
    return known


def read_rope(config: Mapping[str, Any]) -> Json:
    """The rotary parameters of a config.json, with `rope_type` and `rope_theta`."""
    new = config.get("rope_parameters")
    if isinstance(new, Mapping) and ("rope_theta" in new or "rope_type" in new):
        found = dict(new)
    else:
        old = config.get("rope_scaling") or {}
        found = {**old, "rope_type": old.get("rope_type", old.get("type", "default"))}
        found.pop("type", None)
    found.setdefault("rope_type", "default")
    found.setdefault("rope_theta", float(config.get("rope_theta", 10000.0)))
    return found


def read_shape(config: Mapping[str, Any], where: str) -> LayerShape:
    """The sizes of the decoder layers of a config.json; raises `UserError` if one is missing."""
    try:
        hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
        return LayerShape(
            hidden,
            heads,
            int(config.get("num_key_value_heads") or heads),
            int(config.get("head_dim") or hidden // heads),
            int(config["intermediate_size"]),
            float(config.get("rms_norm_eps", 1e-6)),
            attention_bias=bool(config.get("attention_bias", False)),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"'{where}': config.json lacks a size of its decoder layers ({error!r})."
        ) from error


def require_fit(
    shape: LayerShape,
    config: Mapping[str, Any],
    info: TargetInfo,
    where: str,
    *,
    scaled: bool = False,
) -> None:
    """Raise `UserError` where their layers have something that ours of this kind cannot have.

    Ours take the norms' epsilon and the base of the rotary positions from the target; scaled: the
    target's rotary scaling too.
    """
    rope = read_rope(config)
    theta, scaling = float(rope["rope_theta"]), rope["rope_type"]
    if shape.attention_bias:
        fault = "has biases on its attention, which our drafters of this kind do not have"
    elif str(config.get("hidden_act", "silu")) != "silu":
        fault = f"has the activation '{config['hidden_act']}'; ours is silu"
    elif shape.hidden_size != info.hidden_size:
        fault = (
            f"has hidden_size {shape.hidden_size}, the target '{info.id}' {info.hidden_size}: "
            "it is another target's"
        )
    elif abs(shape.rms_norm_eps - info.rms_norm_eps) > 1e-12:
        fault = (
            f"has rms_norm_eps {shape.rms_norm_eps}; ours takes the target's, which is "
            f"{info.rms_norm_eps}"
        )
    elif theta != info.rope_theta:
        fault = f"has rope_theta {theta}; ours takes the target's, which is {info.rope_theta}"
    elif scaling != "default" and not scaled:
        fault = f"scales its rotary positions ({scaling}); ours of this kind do not"
    else:
        return
    raise UserError(f"'{where}' {fault}.")


def sizes_config(shape: LayerShape, info: TargetInfo) -> Json:
    """The sizes as values of a kind's configuration, 0 where they are the target's."""
    names = ("num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size")
    sizes = {name: getattr(shape, name) for name in names}
    return {name: 0 if size == getattr(info, name) else size for name, size in sizes.items()}


def with_qk_norm(shape: LayerShape) -> LayerShape:
    """The same sizes with norms on query and key heads."""
    return replace(shape, qk_norm=True)


def layer_kinds(config: Mapping[str, Any], longest: int, where: str) -> set[str]:
    """The kinds of attention layers; raises `UserError` for a window below `longest` tokens."""
    kinds = set(config.get("layer_types") or ["full_attention"])
    window = config.get("sliding_window")
    if "sliding_attention" in kinds and (not window or int(window) < longest):
        raise UserError(
            f"'{where}' has layers that see {window} tokens; ours see all of a text, which may "
            f"have {longest} here. Train it with full attention."
        )
    return kinds
