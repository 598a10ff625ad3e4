"""Quantised weights: their layout number by number, their error, and what cannot be one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from heads.api.errors import UserError
from inference.target.packed_weights import (
    ALGORITHMS,
    FORMATS,
    FP4,
    FP4_GROUP,
    FP4_MOST,
    FP8,
    FP8_LEAST,
    dequantise,
    pack_fp4,
    quantise,
    require_readable,
    sort_parts,
    unpack_fp4,
)

NAMES = ("int8", "fp8", "nvfp4")


def weight(rows: int = 12, columns: int = 64) -> Tensor:
    """Rows of very different sizes, one of zeros, and one with a group of tiny numbers."""
    generator = torch.Generator().manual_seed(0)
    found = torch.randn(rows, columns, generator=generator)
    found *= 10.0 ** torch.linspace(-3, 2, rows).unsqueeze(1)
    found[3], found[4, :16] = 0, 1e-9
    return found


def error_bound(parts: Mapping[str, Tensor]) -> Tensor:
    """Bound on the error of weights [O, I] that `quantise` quantised.

    int8: half a step. fp8: 2^-4 of the number (three mantissa bits), or half the smallest number.
    nvfp4: the scale of the group, which is half the widest gap of e2m1, and at the ends of the
    range also what the rounding of that scale cuts off (2^-4, or a half below e4m3's normal
    numbers).
    """
    values = dequantise(parts, torch.float32)
    scale = parts["weight_scale"].float()
    if "weight_packed" in parts:
        scale = (scale / parts["weight_global_scale"]).repeat_interleave(FP4_GROUP, 1)
        return scale * torch.where(values.abs() >= FP4_MOST * scale * 0.999, 3.0, 1.0)
    if parts["weight"].dtype == FP8:
        return torch.maximum(values.abs() * 2.0**-4, scale * FP8_LEAST / 2) * (1 + 1e-6)
    return (scale / 2 * (1 + 1e-5)).expand_as(values)


@pytest.mark.parametrize("name", NAMES)
def test_dequantised_weights_are_within_the_bound(name: str) -> None:
    own = weight()
    parts = quantise(own, name)
    gap = (dequantise(parts, torch.float32) - own).abs()
    assert bool((gap <= error_bound(parts)).all())
    assert gap.max() > 0.1 * error_bound(parts).max(), "the bound says something"
    again = quantise(dequantise(parts, torch.float32), name)
    assert torch.equal(dequantise(again, torch.float32), dequantise(parts, torch.float32))


def test_int8_and_fp8_number_by_number() -> None:
    own = weight()
    for name, most in (("int8", 127.0), ("fp8", 448.0)):
        parts = quantise(own, name)
        assert parts["weight"].dtype == (torch.int8 if name == "int8" else FP8)
        assert (
            parts["weight_scale"].shape == (12, 1) and parts["weight_scale"].dtype == torch.float32
        )
        found = dequantise(parts, torch.float32)
        for row in range(12):
            scale = max(float(own[row].abs().max()) / most, 1e-38)
            for column in range(0, 64, 7):
                ratio = torch.tensor(float(own[row, column]) / scale)
                code = ratio.round() if name == "int8" else ratio.to(FP8).float()
                assert float(found[row, column]) == pytest.approx(float(code) * scale, rel=1e-5)


def test_a_byte_holds_two_numbers_of_e2m1() -> None:
    numbers = torch.cat((FP4, -FP4)).view(1, 16)
    packed = pack_fp4(numbers)
    assert packed.shape == (1, 8)
    assert packed[0].tolist() == [0x10, 0x32, 0x54, 0x76, 0x90, 0xBA, 0xDC, 0xFE]
    assert torch.equal(unpack_fp4(packed), numbers)
    values = torch.linspace(-6.5, 6.5, 1001)[:1000].view(1, -1)
    found = unpack_fp4(pack_fp4(values))[0]
    for value, code in zip(values[0].tolist(), found.tolist(), strict=True):
        assert abs(value - code) == pytest.approx(float((FP4 - abs(value)).abs().min()), abs=1e-6)
    ties = torch.tensor([[0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -5.0]])
    assert unpack_fp4(pack_fp4(ties)).tolist() == [[0, 1, 1, 2, 2, 4, 4, -4]]  # to the even code


def test_nvfp4_has_a_scale_per_sixteen_and_one_for_all() -> None:
    parts = quantise(weight(), "nvfp4")
    shapes = {name: (tuple(value.shape), value.dtype) for name, value in parts.items()}
    assert shapes == {
        "weight_packed": ((12, 32), torch.uint8),
        "weight_scale": ((12, 4), FP8),
        "weight_global_scale": ((1,), torch.float32),
    }
    assert float(parts["weight_scale"].float().max()) == 448
    theirs = {  # ModelOpt's names for the same numbers
        "weight": parts["weight_packed"],
        "weight_scale": parts["weight_scale"],
        "weight_scale_2": 1 / parts["weight_global_scale"][0],
    }
    assert torch.allclose(
        dequantise(theirs, torch.float32), dequantise(parts, torch.float32), rtol=1e-6
    )
    with pytest.raises(UserError, match="groups 16 inputs"):
        quantise(weight(columns=40), "nvfp4")


def pack_slowly(codes: Tensor, bits: int) -> Tensor:
    """[O, I] -> int32 words [O, ..], number by number."""
    per = 32 // bits
    words = torch.zeros(codes.shape[0], -(-codes.shape[1] // per), dtype=torch.int64)
    for row in range(codes.shape[0]):
        for column in range(codes.shape[1]):
            code = int(codes[row, column]) + 2 ** (bits - 1)
            words[row, column // per] |= code << (bits * (column % per))
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


@pytest.mark.parametrize("bits", [4, 8])
def test_packed_integers_in_groups_with_zeros_and_an_order(bits: int) -> None:
    generator = torch.Generator().manual_seed(1)
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1)
    codes = torch.randint(low, high, (8, 40), generator=generator)
    zeros = torch.randint(low, high, (8, 5), generator=generator)
    scale = torch.rand(8, 5, generator=generator)
    order = torch.randperm(40, generator=generator) // 8
    parts = {
        "weight_packed": pack_slowly(codes, bits),
        "weight_scale": scale,
        "weight_zero_point": pack_slowly(zeros.T.contiguous(), bits).T.contiguous(),
        "weight_shape": torch.tensor([8, 40]),
        "weight_g_idx": order.int(),
    }
    expected = torch.stack(
        [(codes[:, i] - zeros[:, order[i]]) * scale[:, order[i]] for i in range(40)], 1
    )
    assert torch.allclose(dequantise(parts, torch.float32), expected)


@pytest.mark.parametrize("codes", ["mxfp4", "mxfp8"])
def test_scales_stored_as_exponents_are_powers_of_two(codes: str) -> None:
    numbers = torch.cat((FP4, -FP4)).repeat(3, 4)
    stored = (
        {"weight_packed": pack_fp4(numbers)} if codes == "mxfp4" else {"weight": numbers.to(FP8)}
    )
    exponents = torch.tensor([[127, 130], [120, 127], [127, 100]], dtype=torch.uint8)
    found = dequantise({**stored, "weight_scale": exponents}, torch.float32)
    for row, pair in enumerate(((0, 3), (-7, 0), (0, -27))):
        for group, power in enumerate(pair):
            part = slice(32 * group, 32 * group + 32)
            assert torch.equal(found[row, part], numbers[row, part] * 2.0**power)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"format": "mxfp6-pack-quantized"}, "mxfp6-pack-quantized"),
        ({"format": "marlin-24"}, "marlin-24"),
        (
            {
                "format": "mixed-precision",
                "config_groups": {"a": {"format": "mxfp6-pack-quantized"}},
            },
            "mxfp6-pack-quantized",
        ),
        ({"quant_algo": "w4a16_awq"}, "w4a16_awq"),
        (
            {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": {"quant_algo": "MXFP6"}}},
            "MXFP6",
        ),
    ],
)
def test_a_format_that_is_not_read_is_refused_by_name(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError, match=f"a file is quantised as {named}, .*(mxfp8|MXFP8).* Go."):
        require_readable(settings, "a file", "Go.")


def test_formats_that_are_read_pass() -> None:
    for name in FORMATS:
        require_readable({"format": name, "config_groups": {"a": {}}}, "a file", "Go.")
    for name in (*ALGORITHMS, "fp8_pb_wo"):
        require_readable({"quant_algo": name}, "a file", "Go.")
    require_readable({"quant_algo": None, "kv_cache_quant_algo": "FP8"}, "a file", "Go.")


def test_blocks_may_be_cut_at_the_end() -> None:
    codes = torch.ones(6, 10).to(FP8)
    scale = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    found = dequantise({"weight": codes, "weight_scale": scale}, torch.float32, (4, 4))
    assert found[3].tolist() == [1] * 4 + [2] * 4 + [3] * 2
    assert found[4].tolist() == [4] * 4 + [5] * 4 + [6] * 2


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"weight": torch.ones(4, 4).to(FP8), "weight_scale": torch.ones(3, 1)}, "do not fit"),
        ({"weight": torch.ones(4, 4), "weight_scale": torch.ones(4, 1)}, "no layout"),
        ({"weight_packed": torch.ones(4, 1).int(), "weight_scale": torch.ones(4)}, "weight_shape"),
        ({"weight": torch.ones(4, 4).to(FP8)}, "no quantised weight"),
    ],
)
def test_what_is_no_quantised_weight_is_refused(parts: dict[str, Tensor], message: str) -> None:
    with pytest.raises(UserError, match=message):
        dequantise(parts, torch.float32)


def test_parts_are_sorted_by_layer() -> None:
    names = ("a.q_proj.weight", "a.q_proj.weight_scale", "a.q_proj.input_scale", "a.norm.weight")
    found = sort_parts(dict.fromkeys(names, 0))
    assert found.layers == {"a.q_proj": {"weight": 0, "weight_scale": 0}}
    assert found.others == {"a.norm.weight": 0}


@pytest.mark.parametrize("name", NAMES)
def test_compressed_tensors_reads_the_same_numbers(name: str) -> None:
    """The library's own decompression, where it is installed."""
    compressors = pytest.importorskip("compressed_tensors.compressors")
    library = pytest.importorskip("compressed_tensors.quantization")
    from inference.export.quantised import SCHEMES

    form, settings, _ = SCHEMES[name]
    args = library.QuantizationArgs.model_validate(settings)
    scheme = library.QuantizationScheme(targets=["Linear"], weights=args, format=form)
    parts = quantise(weight(), name)
    reader = compressors.BaseCompressor.get_value_from_registry(form)
    theirs = reader.decompress(dict(parts), scheme)["weight"].float()
    rounding = 2.0**-7 if name == "nvfp4" else 1e-5  # the library computes nvfp4 in bfloat16
    assert torch.allclose(theirs, dequantise(parts, torch.float32), rtol=rounding, atol=1e-12)


FLOAT, INT = {"type": "float", "symmetric": True}, {"type": "int", "symmetric": True}
EXPONENTS = {"scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"}
WRITTEN: dict[str, tuple[dict[str, Any], int, float]] = {
    "int-quantized": ({**INT, "num_bits": 8, "strategy": "channel"}, 64, 127.0),
    "float-quantized": ({**FLOAT, "num_bits": 8, "strategy": "channel"}, 64, 448.0),
    "pack-quantized": ({**INT, "num_bits": 4, "strategy": "group", "group_size": 32}, 32, 7.0),
    "mxfp8-quantized": (
        {**FLOAT, **EXPONENTS, "num_bits": 8, "strategy": "group", "group_size": 32},
        32,
        448.0,
    ),
    "mxfp4-pack-quantized": (
        {**FLOAT, **EXPONENTS, "num_bits": 4, "strategy": "group", "group_size": 32},
        32,
        6.0,
    ),
}
"""Format -> the library's settings of weights, inputs that share a scale, largest code."""


@pytest.mark.parametrize("form", WRITTEN)
def test_what_compressed_tensors_writes_is_read(form: str) -> None:
    """The library's own compression, where it is installed."""
    compressors = pytest.importorskip("compressed_tensors.compressors")
    library = pytest.importorskip("compressed_tensors.quantization")
    settings, width, most = WRITTEN[form]
    args = library.QuantizationArgs.model_validate(settings)
    scheme = library.QuantizationScheme(targets=["Linear"], weights=args, format=form)
    own = weight()
    scale = own.view(12, -1, width).abs().amax(2).clamp(min=1e-20) / most
    if "scale_dtype" in settings:
        scale = torch.exp2(torch.ceil(torch.log2(scale)))
    writer = compressors.BaseCompressor.get_value_from_registry(form)
    parts = writer.compress({"weight": own, "weight_scale": scale}, scheme)
    theirs = writer.decompress(dict(parts), scheme)["weight"].float()
    found = dequantise(parts, torch.float32)
    assert torch.allclose(found, theirs, rtol=1e-5, atol=1e-30)
    assert bool(((found - own).abs() <= scale.repeat_interleave(width, 1) * most / 4).all())
