"""The parts that all layouts take from Hugging Face's Llama: the tensors of a decoder layer and the keys of a config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from heads.api.errors import UserError
from heads.api.target_info import TargetInfo
from heads.nn.blocks import LayerShape
from inference.export.layouts.base import EXACT_ROPES, Row, Target

NORMS = ("input_layernorm", "post_attention_layernorm")


def layer_rows(
    ours: str, theirs: str, shape: LayerShape, width: int = 0, norms: tuple[str, ...] = NORMS
) -> list[Row]:
    """The tensors of one decoder layer under two prefixes. width: of the attention's input (default: the hidden size)."""
    hidden, size = shape.hidden_size, shape.head_dim
    query, value = shape.num_attention_heads * size, shape.num_key_value_heads * size
    wide, mlp = width or hidden, shape.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (query, wide),
        "self_attn.k_proj.weight": (value, wide),
        "self_attn.v_proj.weight": (value, wide),
        "self_attn.o_proj.weight": (hidden, query),
        "mlp.gate_proj.weight": (mlp, hidden),
        "mlp.up_proj.weight": (mlp, hidden),
        "mlp.down_proj.weight": (hidden, mlp),
    }
    if shape.attention_bias:
        shapes |= {
            f"self_attn.{name}_proj.bias": (rows,)
            for name, rows in (("q", query), ("k", value), ("v", value))
        }
    if shape.qk_norm:
        shapes |= {f"self_attn.{name}_norm.weight": (size,) for name in "qk"}
    shapes |= {f"{name}.weight": (hidden,) for name in norms}
    return [Row(ours + name, theirs + name, dims) for name, dims in shapes.items()]


def block_config(shape: LayerShape, info: TargetInfo, layers: int, rope: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of config.json that describe decoder layers, in the spelling of both transformers 4 and 5."""
    described: dict[str, Any] = {
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
        described["rope_scaling"] = {key: value for key, value in rope.items() if key != "rope_theta"}
    return described


def plain_rope(theta: float) -> dict[str, Any]:
    """Rotary positions by their base alone."""
    return {"rope_type": "default", "rope_theta": float(theta)}


def followed_rope(target: Target, head_dim: int, theta: float) -> dict[str, Any]:
    """The rotary parameters of a drafter that rotates as its target does, where the target has one set of the same size.

    Raises `UserError` for scalings that change with the length of the text: the drafter was trained with fixed ones.
    """
    found = target.rope
    kind = str(found.get("rope_type", "default"))
    partial = float(found.get("partial_rotary_factor") or 1.0)
    size = (
        getattr(target.described, "head_dim", None)
        or target.described.hidden_size // target.described.num_attention_heads
    )
    if not found or partial != 1.0 or size != head_dim:
        return plain_rope(theta)
    if kind not in EXACT_ROPES:
        raise UserError(
            f"the target's rotary positions are of type '{kind}', which engines change with the length of the text, while this "
            f"drafter was trained with fixed ones. It cannot be exported; allowed are {', '.join(EXACT_ROPES)}."
        )
    return {
        key: value for key, value in found.items() if value is not None and key != "partial_rotary_factor"
    }


def read_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary parameters of a config.json in either spelling, as one flat table with `rope_type` and `rope_theta`."""
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
    """The sizes of the decoder layers of a config.json; raises `UserError` when one is missing."""
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
        raise UserError(f"'{where}': config.json lacks a size of its decoder layers ({error!r}).") from error


def require_fit(
    shape: LayerShape, config: Mapping[str, Any], info: TargetInfo, where: str, *, scaled: bool = False
) -> None:
    """Raise `UserError` where their decoder layers have something that ours of this kind cannot have.

    Ours take the norms' epsilon and the base of rotary positions from the target; scaled: the target's own scaling is followed.
    """
    if shape.attention_bias:
        raise UserError(
            f"'{where}' has biases on its attention, which our drafters of this kind do not have."
        )
    if str(config.get("hidden_act", "silu")) != "silu":
        raise UserError(f"'{where}' has the activation '{config['hidden_act']}'; ours is silu.")
    if shape.hidden_size != info.hidden_size:
        raise UserError(
            f"'{where}' has hidden_size {shape.hidden_size}, the target '{info.id}' {info.hidden_size}: it is another target's."
        )
    if abs(shape.rms_norm_eps - info.rms_norm_eps) > 1e-12:
        raise UserError(
            f"'{where}' has rms_norm_eps {shape.rms_norm_eps}; ours takes the target's, which is {info.rms_norm_eps}."
        )
    rope = read_rope(config)
    if float(rope["rope_theta"]) != info.rope_theta:
        raise UserError(
            f"'{where}' has rope_theta {rope['rope_theta']}; ours takes the target's, which is {info.rope_theta}."
        )
    if rope["rope_type"] != "default" and not scaled:
        raise UserError(
            f"'{where}' scales its rotary positions ({rope['rope_type']}); ours of this kind do not."
        )


def sizes_config(shape: LayerShape, info: TargetInfo) -> dict[str, int]:
    """The sizes as values of a kind's configuration, 0 where they are the target's, so that both ways give the same values."""
    names = ("num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size")
    return {
        name: 0 if getattr(shape, name) == getattr(info, name) else getattr(shape, name) for name in names
    }


def with_qk_norm(shape: LayerShape) -> LayerShape:
    """The same sizes with norms on query and key heads."""
    return replace(shape, qk_norm=True)


def windows(config: Mapping[str, Any], longest: int, where: str) -> set[str]:
    """The kinds of layers there are; raises `UserError` for a window that text of `longest` tokens does not fit in."""
    kinds = set(config.get("layer_types") or ["full_attention"])
    window = config.get("sliding_window")
    if "sliding_attention" in kinds and (not window or int(window) < longest):
        raise UserError(
            f"'{where}' has layers that see {window} tokens; ours see all of a text, which may have {longest} here. Train it "
            "with full attention."
        )
    return kinds
