"""The parts of Hugging Face's Llama that layouts share: config.json's keys, sizes, rotary
parameters."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from heads.api.errors import UserError
from heads.api.target_info import Rotary, TargetInfo
from heads.nn.blocks import LayerShape
from heads.nn.rope import inverse_frequencies
from inference.export.layouts.base import Target, plain_rope
from inference.export.layouts.folder import Json

EXACT_ROPES = ("default", "linear", "llama3", "yarn")
"""Rotary scalings that engines compute as transformers does, for any length of the text."""
LINEAR = r"layers\.\d+\.(self_attn|mlp)\.\w+_proj"
"""A pattern of the names of decoder layers' linear maps."""
HEADS = ("num_attention_heads", "num_key_value_heads", "head_dim")


def block_config(shape: LayerShape, info: TargetInfo, layers: int, rope: Json) -> Json:
    """The keys of config.json for decoder layers, in the spelling of both transformers 4 and 5."""
    described: Json = {
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": layers,
        **{name: getattr(shape, name) for name in HEADS},
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
        described["rope_scaling"] = {key: rope[key] for key in rope if key != "rope_theta"}
    return described


def follow_rope(target: Target, head_dim: int, theta: float) -> Json:
    """The rotary parameters of a drafter that rotates as its target does.

    They are the target's if it has one set for heads of the same size, else only `theta`. Raises
    `UserError` for scalings that change with the length of the text: the drafter was trained with
    fixed ones.
    """
    found, described = target.rope, target.described
    kind = str(found.get("rope_type", "default"))
    heads = described.hidden_size // described.num_attention_heads
    size = getattr(described, "head_dim", None) or heads
    if not found or is_partial(found) or size != head_dim:
        return plain_rope(theta)
    if kind not in EXACT_ROPES:
        raise UserError(
            f"the target's rotary positions are of type '{kind}', which engines change with the "
            "length of the text, while this drafter was trained with fixed ones. It cannot be "
            f"exported; allowed are {', '.join(EXACT_ROPES)}."
        )
    left = ("partial_rotary_factor",)
    return {key: value for key, value in found.items() if value is not None and key not in left}


def is_partial(rope: Json) -> bool:
    """Whether only a part of each head is rotated."""
    return float(rope.get("partial_rotary_factor") or 1.0) != 1.0


def read_rope(config: Json) -> Json:
    """The rotary parameters of a config.json, with `rope_type` and `rope_theta`, and with
    `partial_rotary_factor` if it names one."""
    new = config.get("rope_parameters")
    if isinstance(new, Mapping) and ("rope_theta" in new or "rope_type" in new):
        found = dict(new)
    else:
        found = dict(config.get("rope_scaling") or {})
        found.setdefault("rope_type", found.pop("type", "default"))
    found.setdefault("rope_type", "default")
    found.setdefault("rope_theta", float(config.get("rope_theta", 10000.0)))
    if config.get("partial_rotary_factor") is not None:
        found.setdefault("partial_rotary_factor", config["partial_rotary_factor"])
    return found


def read_shape(config: Json, where: Path) -> LayerShape:
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
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise UserError(
            f"'{where}': config.json lacks a size of its decoder layers ({error!r})."
        ) from error


def require_fit(
    shape: LayerShape, config: Json, info: TargetInfo, where: Path, *, scaled: bool = False
) -> None:
    """Raise `UserError` where their layers have something that layers of this kind cannot have.

    Layers of this kind take the norms' epsilon and the base of the rotary positions from the
    target; scaled: they may scale it (see `require_same_rotations`).
    """
    rope = read_rope(config)
    theta, scaling = float(rope["rope_theta"]), rope["rope_type"]
    if shape.attention_bias:
        fault = "has biases on its attention, which our drafters of this kind do not have"
    elif str(config.get("hidden_act", "silu")) != "silu":
        fault = f"has the activation '{config['hidden_act']}'; ours is silu"
    elif shape.hidden_size != info.hidden_size:
        own = f"hidden_size {shape.hidden_size}, the target '{info.id}' {info.hidden_size}"
        fault = f"has {own}: it is another target's"
    elif abs(shape.rms_norm_eps - info.rms_norm_eps) > 1e-12:
        found, eps = shape.rms_norm_eps, info.rms_norm_eps
        fault = f"has rms_norm_eps {found}; ours takes the target's, which is {eps}"
    elif theta != info.rope_theta:
        fault = f"has rope_theta {theta}; ours takes the target's, which is {info.rope_theta}"
    elif is_partial(rope):
        part = rope["partial_rotary_factor"]
        fault = f"rotates a part of each head (partial_rotary_factor {part}); ours rotate all of it"
    elif scaling != "default" and not scaled:
        fault = f"scales its rotary positions ({scaling}); ours of this kind do not"
    else:
        return
    raise UserError(f"'{where}' {fault}.")


def require_same_rotations(
    shape: LayerShape, config: Json, rotary: Rotary | None, where: Path
) -> None:
    """Raise `UserError` unless their layers rotate as ours will: as the target does if its heads
    have the same size, else by the base alone. rotary: the target's."""
    rope = read_rope(config)
    plain = inverse_frequencies(shape.head_dim, float(rope["rope_theta"]))
    fits = rotary is not None and rotary.inverse_frequencies.shape == plain.shape
    ours = rotary if rotary is not None and fits else Rotary(plain)
    theirs = Rotary(plain)
    if rope["rope_type"] != "default":
        described = LlamaConfig(
            hidden_size=shape.hidden_size,
            num_attention_heads=shape.num_attention_heads,
            head_dim=shape.head_dim,
            max_position_embeddings=int(config.get("max_position_embeddings") or 2048),
            rope_parameters=dict(rope),
        )
        try:
            made = ROPE_INIT_FUNCTIONS[rope["rope_type"]](described, torch.device("cpu"))
        except (KeyError, TypeError, ValueError, ArithmeticError) as error:
            raise UserError(
                f"'{where}': the rotary scaling of its config.json cannot be read ({error!r})."
            ) from error
        theirs = Rotary(made[0].float(), float(made[1]))
    same = torch.allclose(
        theirs.inverse_frequencies, ours.inverse_frequencies.float().cpu(), rtol=1e-4, atol=0.0
    )
    if not same or abs(theirs.scale - ours.scale) > 1e-4:
        raise UserError(
            f"'{where}' rotates by other frequencies ({rope['rope_type']}) than ours would, which "
            "take the target's scaling. Was it made for this target?"
        )


def sizes_config(shape: LayerShape, info: TargetInfo) -> Json:
    """The sizes as values of a kind's configuration, 0 where they are the target's."""
    sizes = {name: getattr(shape, name) for name in (*HEADS, "intermediate_size")}
    return {name: 0 if size == getattr(info, name) else size for name, size in sizes.items()}


def layer_kinds(config: Json, longest: int, where: Path) -> set[str]:
    """The kinds of attention layers; raises `UserError` for a window below `longest` tokens."""
    kinds = set(config.get("layer_types") or ["full_attention"])
    window = config.get("sliding_window")
    if "sliding_attention" in kinds and (not window or int(window) < longest):
        raise UserError(
            f"'{where}' has layers that see {window} tokens; ours see all of a text, which may "
            f"have {longest} here. Train it with full attention."
        )
    return kinds
