"""What stored features weigh: bytes per token of every format, and of a whole store before its
first byte is written.

The formats (H: hidden size; one slot: one tap, or the last hidden state, of one token):

    fp32   4 H          the target's own numbers, for trainings in float32
    bf16   2 H          what a training in bfloat16 is given online, bit for bit
    fp8      H + 2      e4m3, one bfloat16 scale per slot
    int8     H + 2      one bfloat16 scale per slot
    int4     H/2 + H/16 groups of 32 values with a bfloat16 scale each
"""

from __future__ import annotations

from heads.api.errors import UserError, suggest
from heads.api.features import FeatureSpec
from heads.api.target_info import TargetInfo

FORMATS = ("fp32", "bf16", "fp8", "int8", "int4")
GROUP = 32
"""Values of one slot that share a scale in int4: 4.5 bits a value, 28.1% of bf16."""
SCALE_BYTES = 2
ROW_ENTRY_BYTES, SHARD_HEADER_BYTES, TENSOR_HEADER_BYTES = 56, 700, 90
"""Of a row's line in the index, and of a shard's entries in the index, the manifest and its own
header."""


def check_format(fmt: str) -> None:
    """Raise `UserError` for a format that there is not."""
    if fmt not in FORMATS:
        raise UserError(f"features.format '{fmt}' is unknown.{suggest(fmt, FORMATS)}")


def slots(needs: FeatureSpec) -> int:
    """States of H values per token: taps, and the last hidden state, from which logits follow."""
    return len(needs.taps) + int(needs.last_hidden or needs.logits)


def slot_bytes(hidden: int, fmt: str) -> int:
    """Bytes of one state of `hidden` values."""
    check_format(fmt)
    if fmt == "fp32":
        return 4 * hidden
    if fmt == "bf16":
        return 2 * hidden
    if fmt in ("fp8", "int8"):
        return hidden + SCALE_BYTES
    groups = -(-hidden // GROUP)
    return groups * (GROUP // 2 + SCALE_BYTES)


def top_bytes(top: int) -> int:
    """Bytes of a token's `top` largest logits: float16 values, int32 ids, a float32 logsumexp."""
    return 6 * top + 4 if top else 0


def bytes_per_token(needs: FeatureSpec, info: TargetInfo, fmt: str, top_logits: int = 0) -> float:
    """Bytes on disk of one token's features, without files' headers; top_logits: see `Form`."""
    states = len(needs.taps) if top_logits else slots(needs)
    return float(states * slot_bytes(info.hidden_size, fmt) + top_bytes(top_logits))


def store_bytes(per_token: float, tokens: int, rows: int, shards: int, tensors: int) -> int:
    """Bytes of a store of `tokens` real tokens in `rows` rows, with `tensors` tensors a shard."""
    headers = shards * (SHARD_HEADER_BYTES + tensors * TENSOR_HEADER_BYTES)
    return round(per_token * tokens) + rows * ROW_ENTRY_BYTES + headers
