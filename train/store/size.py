"""What stored features weigh: bytes per token of every format, and of a whole store before its first byte is written.

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


def check_format(format: str) -> None:
    """Raise `UserError` for a format that there is not."""
    if format not in FORMATS:
        raise UserError(f"features.format '{format}' is unknown.{suggest(format, FORMATS)}")


def slots(needs: FeatureSpec) -> int:
    """How many states of H values one token has in the store: its taps, and the last hidden state if it is read."""
    return len(needs.taps) + int(needs.last_hidden)


def slot_bytes(hidden: int, format: str) -> int:
    """Bytes of one state of `hidden` values."""
    check_format(format)
    if format == "fp32":
        return 4 * hidden
    if format == "bf16":
        return 2 * hidden
    if format in ("fp8", "int8"):
        return hidden + SCALE_BYTES
    groups = -(-hidden // GROUP)
    return groups * (GROUP // 2 + SCALE_BYTES)


def top_bytes(top: int) -> int:
    """Bytes of the `top` largest logits of one token: a bfloat16 value and an int32 id each, and a float32 logsumexp."""
    return 6 * top + 4 if top else 0


def bytes_per_token(needs: FeatureSpec, info: TargetInfo, format: str, top_logits: int = 0) -> float:
    """Bytes on disk of one token's features, files' headers excluded (see `store_bytes` for those)."""
    return float(slots(needs) * slot_bytes(info.hidden_size, format) + top_bytes(top_logits))
