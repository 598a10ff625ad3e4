"""Encoding and decoding of stored states, and their sizes.

A state is one token's H values of one tap, or its last hidden state. Its formats and their bytes:

    fp32   4 H          the target's own numbers, for trainings in float32
    bf16   2 H          the features of a training in bfloat16 online, bit for bit
    fp8      H + 2      e4m3, one bfloat16 scale per state
    int8     H + 2      one bfloat16 scale per state
    int4     H/2 + H/16 groups of 32 values with a bfloat16 scale each

Scales are bfloat16, which holds any size of states. They are rounded before the values are divided
by them, so that the rounding of a scale adds no further error.

Legend: N tokens, H hidden, G groups of `GROUP` values.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as fn

from heads.api.errors import UserError, suggest
from heads.api.features import FeatureSpec
from heads.api.target_info import TargetInfo

FORMATS = ("fp32", "bf16", "fp8", "int8", "int4")
GROUP = 32
"""Values of one state that share a scale in int4: 4.5 bits a value, 28.1% of bf16."""
ROW_ENTRY_BYTES, SHARD_HEADER_BYTES, TENSOR_HEADER_BYTES = 56, 700, 90
"""Of a row's line in the index, and of a shard's entries in the index, the manifest and its own
header."""
FP8 = torch.float8_e4m3fn
FP8_MAX, INT8_MAX, INT4_MAX = 448.0, 127.0, 7.0
SHRINKS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)
"""int4: shares of a group's largest value that are tried as the end of its scale; the one with the
least squared error is kept."""


def check_format(fmt: str) -> None:
    """Raise `UserError` for an unknown format."""
    if fmt not in FORMATS:
        raise UserError(f"features.format '{fmt}' is unknown.{suggest(fmt, FORMATS)}")


def parts_of(fmt: str, hidden: int) -> dict[str, tuple[torch.dtype, int]]:
    """dtype and values per state of a format's tensors; 0: one number without a dimension."""
    check_format(fmt)
    groups = -(-hidden // GROUP)
    return {
        "fp32": {"values": (torch.float32, hidden)},
        "bf16": {"values": (torch.bfloat16, hidden)},
        "fp8": {"values": (FP8, hidden), "scales": (torch.bfloat16, 0)},
        "int8": {"values": (torch.int8, hidden), "scales": (torch.bfloat16, 0)},
        "int4": {"values": (torch.uint8, groups * GROUP // 2), "scales": (torch.bfloat16, groups)},
    }[fmt]


def encode(states: Tensor, fmt: str) -> dict[str, Tensor]:
    """states [N, H] -> `values`, and `scales` if the format has them, on the states' device."""
    check_format(fmt)
    if fmt in ("fp32", "bf16"):
        dtype = torch.float32 if fmt == "fp32" else torch.bfloat16
        return {"values": states.to(dtype).contiguous()}
    exact = states.float()
    if fmt == "int4":
        return _encode_int4(exact)
    scales = _scale(exact, FP8_MAX if fmt == "fp8" else INT8_MAX)
    scaled = exact / scales.float()[:, None]
    if fmt == "fp8":
        return {"values": scaled.clamp(-FP8_MAX, FP8_MAX).to(FP8), "scales": scales}
    return {"values": scaled.round().clamp(-INT8_MAX, INT8_MAX).to(torch.int8), "scales": scales}


def decode(stored: Mapping[str, Tensor], fmt: str, hidden: int, dtype: torch.dtype) -> Tensor:
    """The result of `encode`, or any of its rows, as states [N, hidden] in `dtype`."""
    values = stored["values"]
    if fmt in ("fp32", "bf16"):
        return values.to(dtype)
    scales = stored["scales"].float()
    if fmt == "int4":
        codes = torch.stack([values & 15, values >> 4], -1).flatten(1)  # [N, G * GROUP], 0 to 15
        groups = (codes.float() - 8.0).unflatten(1, (-1, GROUP)) * scales[..., None]
        return groups.flatten(1)[:, :hidden].to(dtype)
    return (values.float() * scales[:, None]).to(dtype)


def _scale(values: Tensor, largest: float) -> Tensor:
    """bfloat16 scales over the last dimension: `largest` is the largest value; 1 for zeros."""
    peak = values.abs().amax(-1)
    return torch.where(peak > 0, peak / largest, torch.ones_like(peak)).to(torch.bfloat16)


def _encode_int4(exact: Tensor) -> dict[str, Tensor]:
    """Two values a byte (first in the low half), a scale per group of the least squared error."""
    padded = fn.pad(exact, (0, -exact.shape[1] % GROUP))
    groups = padded.unflatten(1, (-1, GROUP))  # [N, G, GROUP]
    best = groups.new_full(groups.shape[:2], float("inf"))
    scales = groups.new_ones(groups.shape[:2], dtype=torch.bfloat16)
    codes = torch.zeros_like(groups)
    for shrink in SHRINKS:
        tried = _scale(groups, INT4_MAX / shrink)
        rounded = (groups / tried.float()[..., None]).round().clamp(-INT4_MAX - 1, INT4_MAX)
        error = (rounded * tried.float()[..., None] - groups).square().sum(-1)
        better = error < best
        best = torch.where(better, error, best)
        scales = torch.where(better, tried, scales)
        codes = torch.where(better[..., None], rounded, codes)
    whole = (codes + 8.0).to(torch.uint8).flatten(1)
    return {"values": whole[:, 0::2] | (whole[:, 1::2] << 4), "scales": scales}


def states_of(needs: FeatureSpec) -> int:
    """States per token: taps, and the last hidden state, from which logits follow."""
    return len(needs.taps) + int(needs.last_hidden or needs.logits)


def slot_bytes(hidden: int, fmt: str) -> int:
    """Bytes of one state of `hidden` values."""
    return sum(max(1, width) * dtype.itemsize for dtype, width in parts_of(fmt, hidden).values())


def bytes_per_token(needs: FeatureSpec, info: TargetInfo, fmt: str, top_logits: int = 0) -> float:
    """Bytes on disk of one token's features. top_logits: how many logits (float16 value, int32 id;
    one float32 logsumexp) are stored in place of the last hidden state; 0: none."""
    states = len(needs.taps) if top_logits else states_of(needs)
    top = 6 * top_logits + 4 if top_logits else 0
    return float(states * slot_bytes(info.hidden_size, fmt) + top)


def store_bytes(per_token: float, tokens: int, rows: int, shards: int, tensors: int) -> int:
    """Bytes of a store of `tokens` real tokens in `rows` rows, with `tensors` tensors a shard."""
    headers = shards * (SHARD_HEADER_BYTES + tensors * TENSOR_HEADER_BYTES)
    return round(per_token * tokens) + rows * ROW_ENTRY_BYTES + headers
