"""`export.quantise`: writes a drafter's weights in 8 or 4 bits, as vLLM reads them, and reads them
back.

The layout is compressed-tensors': the tensors of `inference.target.packed_weights`, and a
quantization_config in config.json that vLLM applies to the linear layers of the drafter's model
class. The engine quantises activations of int8 and fp8 per token; those of nvfp4 stay as they are.
Embedding, LM head, norms and the small parts of block drafters stay as they are.

vLLM joins q, k and v of a decoder layer, and gate and up, to one matrix each, and applies the
largest of their `weight_global_scale` to all of it. So nvfp4 has one such scale per joined matrix.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from heads.api.errors import UserError
from inference.export.layouts.base import Layout, Written
from inference.export.layouts.folder import Folder, Json
from inference.target.packed_weights import Name, dequantise, quantise, require_readable, sort_parts

KEY = "quantization_config"
METHOD = "compressed-tensors"
PER_OUTPUT = {"num_bits": 8, "strategy": "channel", "symmetric": True, "dynamic": False}
PER_TOKEN = {"num_bits": 8, "strategy": "token", "symmetric": True, "dynamic": True}
SCHEMES: dict[str, tuple[str, Json, Json | None]] = {
    "int8": ("int-quantized", PER_OUTPUT | {"type": "int"}, PER_TOKEN | {"type": "int"}),
    "fp8": ("float-quantized", PER_OUTPUT | {"type": "float"}, PER_TOKEN | {"type": "float"}),
    "nvfp4": (
        "nvfp4-pack-quantized",
        {
            "num_bits": 4,
            "type": "float",
            "strategy": "tensor_group",
            "group_size": 16,
            "symmetric": True,
            "dynamic": False,
            "scale_dtype": "torch.float8_e4m3fn",
            "zp_dtype": "torch.float8_e4m3fn",
        },
        None,
    ),
}
"""compressed-tensors' name of the format, its settings of weights, and of activations."""
PLAIN = (
    *("lm_head", "re:.*markov_head.*", "re:.*confidence_head.*"),
    *(r"re:.*_conv\..*", "re:.*lilicorr.*"),
)
"""Modules of drafters that vLLM would build with separate linear layers and that stay
unquantised."""


def linear_weights(layout: Layout | None, engine: str, name: str) -> str:
    """The layout's pattern of linear layers. Raises `UserError` where the engine builds them
    without the drafter's own quantization settings."""
    if engine != "vllm" or layout is None:
        raise UserError(
            f"export.quantise={name} writes a folder that vLLM reads; given "
            f"export.engine={engine}. Export for vllm, or without export.quantise."
        )
    if not layout.linear:
        raise UserError(
            f"vLLM builds drafters of layout {layout.name} without a quantization of their own, so "
            f"export.quantise={name} cannot be read. Leave it out."
        )
    return layout.linear


def quantise_folder(written: Written, tensors: dict[str, Tensor], pattern: str, name: Name) -> None:
    """Replace the weights in `tensors` whose layers match `pattern`, and record that in
    config.json."""
    found = {each: re.fullmatch(rf"({pattern})\.weight", each) for each in tensors}
    chosen = {match[1]: tensors.pop(each) for each, match in found.items() if match}
    largest: dict[str, float] = {}
    for layer, weight in chosen.items():
        joined = joined_layer(layer)
        largest[joined] = max(largest.get(joined, 0.0), float(weight.abs().max()))
    for layer, weight in chosen.items():
        parts = quantise(weight, name, largest[joined_layer(layer)])
        tensors |= {f"{layer}.{end}": value.contiguous() for end, value in parts.items()}
    form, weights, activations = SCHEMES[name]
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    written.config[KEY] = {
        "quant_method": METHOD,
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {**group, "output_activations": None, "format": form}},
        "ignore": list(PLAIN),
        "kv_cache_scheme": None,
    }
    written.notes.append(
        f"weights of linear layers are {name}; embedding, LM head and norms are not quantised"
    )


def joined_layer(layer: str) -> str:
    """vLLM's name of a linear layer, or of the one that it joins it to."""
    layer = re.sub(r"\.[qkv]_proj$", ".qkv_proj", layer)
    return re.sub(r"\.(gate|up)_proj$", ".gate_up_proj", layer)


def open_weights(folder: Folder) -> tuple[Folder, list[str]]:
    """A folder with plain weights in the number format of its config.json, and the faults of its
    quantised weights. Weights that cannot be dequantised are missing from the folder."""
    settings = folder.config.get(KEY)
    if not isinstance(settings, dict):
        return folder, []
    if settings.get("quant_method") != METHOD:
        raise UserError(
            f"'{folder.path}' is quantised with {settings.get('quant_method')}; drafters are read "
            f"in the layout of {METHOD}. Fetch one in full precision."
        )
    require_readable(settings, f"'{folder.path}'", "Fetch one in full precision.")
    named = str(folder.config.get("dtype") or folder.config.get("torch_dtype") or "bfloat16")
    dtype = getattr(torch, named.removeprefix("torch."), torch.bfloat16)
    packed, faults = sort_parts(folder.tensors), []
    plain: dict[str, Tensor] = dict(packed.others)
    for layer, parts in packed.layers.items():
        try:
            plain[f"{layer}.weight"] = dequantise(parts, dtype)
        except UserError as error:
            faults.append(f"quantised: '{layer}': {error}")
    faults += [f"quantised: '{layer}': {fault}" for layer, fault in wrong_scales(packed.layers)]
    config = {key: value for key, value in folder.config.items() if key != KEY}
    return replace(folder, config=config, tensors=plain), faults


def wrong_scales(layers: dict[str, dict[str, Tensor]]) -> list[tuple[str, str]]:
    """Layers whose scales are not finite and positive."""
    found = []
    for layer, parts in layers.items():
        for end in ("weight_scale", "weight_global_scale"):
            scale = parts[end].float() if end in parts else torch.ones(1)
            if not bool((torch.isfinite(scale) & (scale > 0)).all()):
                found.append((layer, f"{end} holds values that are no positive numbers"))
    return found


def unequal_scales(tensors: dict[str, Tensor]) -> Iterator[str]:
    """Faults of a folder in which layers that vLLM joins have global scales of their own. Each
    layer can be read by itself, so that an import is right."""
    first: dict[str, tuple[str, Tensor]] = {}
    for layer, parts in sort_parts(tensors).layers.items():
        scale = parts.get("weight_global_scale")
        if scale is None:
            continue
        other, shared = first.setdefault(joined_layer(layer), (layer, scale))
        if not torch.equal(scale, shared):
            yield (
                f"quantised: '{layer}': weight_global_scale is not that of '{other}'; the engine "
                "joins these layers and applies the largest to all of them. Export it again."
            )
