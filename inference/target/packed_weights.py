"""Quantised weights in the layouts of compressed-tensors and ModelOpt, to and from plain numbers.

The weight [O, I] of a linear layer is stored as several tensors under the layer's name (`PARTS`):

| layout | codes | scales | weight |
|---|---|---|---|
| int8, fp8 | `weight` [O, I] | `weight_scale`: [], [1], [O, 1], [O, G] or blocks | codes x scale |
| packed integers | `weight_packed` [O, I x bits / 32] int32 | `weight_scale` [O, G] | (codes - zero) x scale |
| NVFP4, compressed-tensors | `weight_packed` [O, I / 2] uint8 | `weight_scale` [O, I / 16] fp8, `weight_global_scale` | codes x scale / global |
| NVFP4, ModelOpt | `weight` [O, I / 2] uint8 | `weight_scale` [O, I / 16] fp8, `weight_scale_2` | codes x scale x scale_2 |
| MXFP4 | `weight_packed` or `weight` [O, I / 2] uint8 | `weight_scale` [O, I / 32] uint8 | codes x 2^(scale - 127) |
| MXFP8 | `weight` [O, I] fp8 | `weight_scale` [O, I / 32] uint8 | codes x 2^(scale - 127) |

fp8 is e4m3. A code of NVFP4 and MXFP4 is e2m1 (1 sign, 2 exponent and 1 mantissa bits); a byte
holds two, the first in its low half. Packed integers are stored with an offset of 2^(bits - 1), the
first in the lowest bits. Scales of activations and of key/value caches are stored beside them
(`IGNORED`); multiplying with plain weights does not need them.

Legend: O outputs, I inputs, G groups of inputs with a scale each.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from heads.api.errors import UserError

Name = Literal["int8", "fp8", "nvfp4"]
"""Formats that weights are quantised to."""
FP8 = torch.float8_e4m3fn
FP8_MOST, FP8_LEAST = 448.0, 2.0**-9
"""Largest and smallest positive number of e4m3."""
FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
"""Numbers of e2m1 without a sign, by code."""
FP4_MOST, FP4_GROUP = 6.0, 16
_EVEN_BELOW = (0.25, 1.25, 2.5, 5.0)
_EVEN_ABOVE = (0.75, 1.75, 3.5)
"""The midpoints between numbers of e2m1, by the neighbour that has the even code and gets ties."""
PARTS = (
    "weight_packed weight_scale weight_scale_inv weight_scale_2 weight_global_scale "
    "weight_zero_point weight_shape weight_g_idx"
).split()
"""Tensors stored beside, or instead of, a quantised layer's `weight`."""
IGNORED = (
    "input_scale input_global_scale input_zero_point output_scale k_scale v_scale q_scale "
    "k_zero_point v_zero_point"
).split()
"""Scales of other values than weights."""
WORD = 32
"""Bits of the words that integers are packed into."""
FORMATS = (
    "dense int-quantized float-quantized naive-quantized pack-quantized nvfp4-pack-quantized "
    "mxfp4-pack-quantized mxfp8-quantized mixed-precision"
).split()
"""compressed-tensors' names of the formats that `dequantise` reads."""
ALGORITHMS = (
    "FP8 FP8_PER_CHANNEL_PER_TOKEN FP8_PB_WO FP8_BLOCK_SCALES W8A16 W8A8_SQ_PER_CHANNEL NVFP4 "
    "NVFP4_AWQ W4A16_NVFP4 W4A8_NVFP4_FP8 MXFP4 W4A8_MXFP4_FP8 MXFP8 MIXED_PRECISION"
).split()
"""ModelOpt's names of the methods whose weights `dequantise` reads."""


def require_readable(settings: Mapping[str, Any], where: str, instead: str) -> None:
    """Raise `UserError` for a checkpoint whose quantization settings name a format that
    `dequantise` does not read: other codes can be stored in tensors of the same types and names.
    where: what is refused; instead: what to do."""
    for inner, key, known in (
        ("config_groups", "format", FORMATS),
        ("quantized_layers", "quant_algo", ALGORITHMS),
    ):
        named = [each.get(key) for each in (settings, *(settings.get(inner) or {}).values())]
        for name in filter(None, named):
            if str(name).lower() not in map(str.lower, known):
                raise UserError(
                    f"{where} is quantised as {name}, which is not read. Read are "
                    f"{', '.join(known)}. {instead}"
                )


def quantise(weight: Tensor, name: Name, largest: float | None = None) -> dict[str, Tensor]:
    """The tensors, by the end of their names, of a weight [O, I] with finite values.

    int8 and fp8 have one float32 scale per output (`weight_scale` [O, 1]); nvfp4 has one per 16
    inputs (e4m3), and one for all (float32 [1]). largest: the largest absolute number of all
    weights that share that last scale; default: of this one. Raises `UserError` for a width that
    nvfp4 cannot group.
    """
    wide = weight.detach().float()
    if name == "nvfp4":
        return _quantise_fp4(wide, float(wide.abs().max()) if largest is None else largest)
    most = FP8_MOST if name == "fp8" else 127.0
    scale = (wide.abs().amax(1, keepdim=True) / most).clamp(min=torch.finfo(torch.float32).tiny)
    ratio = (wide / scale).clamp(-most, most)
    codes = ratio.to(FP8) if name == "fp8" else ratio.round().to(torch.int8)
    return {"weight": codes, "weight_scale": scale}


def _quantise_fp4(wide: Tensor, largest: float) -> dict[str, Tensor]:
    rows, columns = wide.shape
    if columns % FP4_GROUP:
        raise UserError(
            f"nvfp4 groups {FP4_GROUP} inputs, and a weight of this drafter has {columns}. Use "
            "int8 or fp8."
        )
    groups = wide.view(rows, -1, FP4_GROUP)
    most = torch.tensor(largest).clamp(min=torch.finfo(torch.float32).tiny).to(wide.device)
    whole = (FP8_MOST * FP4_MOST / most).clamp(max=torch.finfo(torch.float32).max)
    needed = groups.abs().amax(2) / FP4_MOST * whole
    scale = needed.clamp(FP8_LEAST, FP8_MOST).to(FP8)
    ratio = groups / (scale.float() / whole).unsqueeze(2)
    return {
        "weight_packed": pack_fp4(ratio.reshape(rows, columns)),
        "weight_scale": scale,
        "weight_global_scale": whole.reshape(1),
    }


def pack_fp4(values: Tensor) -> Tensor:
    """The nearest codes of e2m1 (ties to the even code) of values [O, I], as bytes [O, I / 2]."""
    below = torch.tensor(_EVEN_BELOW)
    above = torch.nextafter(torch.tensor(_EVEN_ABOVE), torch.zeros(3))
    middles = torch.cat((below, above)).sort().values.to(values.device)
    codes = torch.bucketize(values.abs().float(), middles)
    codes = (codes | ((values < 0).to(codes.dtype) << 3)).to(torch.uint8)
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


def unpack_fp4(packed: Tensor) -> Tensor:
    """The numbers [O, I] of bytes [O, I / 2]."""
    codes = torch.stack((packed & 15, packed >> 4), 2).flatten(1)
    values = FP4.to(packed.device)[(codes & 7).long()]
    return torch.where(codes >= 8, -values, values)


def unpack_integers(packed: Tensor, bits: int, count: int, along: int) -> Tensor:
    """Integers [.., count, ..] of words packed along one axis, without their offset."""
    shifts = torch.arange(0, WORD, bits, device=packed.device)
    words = packed.movedim(along, -1).unsqueeze(-1)
    codes = ((words >> shifts) & (2**bits - 1)).flatten(-2)[..., :count] - 2 ** (bits - 1)
    return codes.movedim(-1, along)


def dequantise(
    parts: Mapping[str, Tensor], dtype: torch.dtype, block: Sequence[int] = ()
) -> Tensor:
    """The weight [O, I] of a layer's tensors, given by the ends of their names. block: rows and
    columns that share a scale, if the checkpoint's settings name them. Raises `UserError` if the
    tensors do not fit together, or have an unknown layout."""
    codes, scale = parts.get("weight_packed", parts.get("weight")), parts.get("weight_scale")
    scale = parts.get("weight_scale_inv") if scale is None else scale
    if codes is None or scale is None or codes.ndim != 2:
        raise UserError(f"the tensors {sorted(parts)} are no quantised weight that is known")
    zero, factor = parts.get("weight_zero_point"), scale.float()
    if scale.dtype == torch.uint8:  # MXFP4 and MXFP8: powers of two, stored as their exponents
        factor = torch.exp2(factor - 127)
    if codes.dtype == torch.int32:
        return _dequantise_packed(parts, codes, factor).to(dtype)
    if codes.dtype == torch.uint8:
        values = unpack_fp4(codes)
        if "weight_global_scale" in parts:
            factor = factor / parts["weight_global_scale"].float()
        if "weight_scale_2" in parts:
            factor = factor * parts["weight_scale_2"].float()
    elif codes.dtype in (torch.int8, FP8):
        values = codes.float()
    else:
        raise UserError(f"codes of {codes.dtype} are of no layout that is known")
    if zero is not None:
        values = values - spread(zero.float(), values.shape, block)
    return (values * spread(factor, values.shape, block)).to(dtype)


def spread(scale: Tensor, shape: torch.Size, block: Sequence[int] = ()) -> Tensor:
    """Expand scales to the numbers of a weight [O, I]. They may be one ([] or [1]), [O], [O, G], or
    per block ([O / a, I / b], or [O / a, 1, I / b, 1]), and the last block may be cut. Raises
    `UserError` for any other shape."""
    if scale.numel() == 1:
        return scale.reshape(1, 1)
    fault = UserError(f"scales of shape {list(scale.shape)} do not fit a weight {list(shape)}")
    if scale.ndim == 4:
        scale = scale[:, 0, :, 0]
    if scale.ndim == 1:
        scale = scale.unsqueeze(1)
    if scale.ndim != 2:
        raise fault
    for axis, size in enumerate(shape):
        count = scale.shape[axis]
        width = block[axis] if block and count not in (1, size) else size // max(count, 1)
        if not width or -(-size // width) != count:
            raise fault
        scale = scale.repeat_interleave(width, axis).narrow(axis, 0, size)
    return scale


def _dequantise_packed(parts: Mapping[str, Tensor], packed: Tensor, scale: Tensor) -> Tensor:
    """The weight of packed integers [O, I x bits / 32] with scales [O, G]."""
    if "weight_shape" not in parts:
        raise UserError(f"the tensors {sorted(parts)} are packed integers without a weight_shape")
    rows, columns = (int(size) for size in parts["weight_shape"].tolist())
    fitting = [bits for bits in (8, 4, 2) if -(-columns // (WORD // bits)) == packed.shape[1]]
    if not fitting or packed.shape[0] != rows:
        raise UserError(f"words {list(packed.shape)} do not hold a weight [{rows}, {columns}]")
    values = unpack_integers(packed, fitting[0], columns, 1).float()
    zero, order = parts.get("weight_zero_point"), parts.get("weight_g_idx")
    if zero is not None and zero.dtype == torch.int32:
        zero = unpack_integers(zero, fitting[0], rows, 0)
    if order is not None and scale.ndim == 2 and bool((order >= 0).all()):
        scale = scale[:, order.long()]
        zero = None if zero is None else zero[:, order.long()]
    if zero is not None:
        values = values - spread(zero.float(), values.shape)
    return values * spread(scale, values.shape)


@dataclass(frozen=True)
class Packed:
    """Tensors of a checkpoint. layers: those of quantised layers, by the layer's name and the end
    of their own names; others: all others except `IGNORED` ones."""

    layers: dict[str, dict[str, Any]]
    others: dict[str, Any]


def sort_parts(tensors: Mapping[str, Any]) -> Packed:
    """Sort a checkpoint's tensors, or any values in their place, by name."""
    marks = (".weight_packed", ".weight_scale", ".weight_scale_inv")
    layers = {name.removesuffix(mark) for name in tensors for mark in marks if name.endswith(mark)}
    found = Packed({layer: {} for layer in layers}, {})
    for name, value in tensors.items():
        layer, _, end = name.rpartition(".")
        if layer in layers and (end in PARTS or end == "weight"):
            found.layers[layer][end] = value
        elif not any(name.endswith(f".{each}") for each in IGNORED):
            found.others[name] = value
    return found
