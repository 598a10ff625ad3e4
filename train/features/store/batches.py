"""Conversion of a training batch to the form that is stored or sent, and back.

The form is `{thing: {part: tensor}}` over the N tokens that are not padding.

Teacher logits (`top`): the k largest log-probabilities, their ids, and the logsumexp of all logits.
They replace the last hidden state for kinds that read it only to compute the target's distribution.
The rows that such a kind takes from `TrainBatch.last_hidden` and passes to `target_logits` then
have 2 k + 1 numbers instead of H. The mass outside the k tokens is spread evenly.

Legend: B rows, T positions, N real tokens, n taps, H hidden, V vocabulary, k stored logits, M
selected positions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from heads.api.batch import TrainBatch
from heads.api.errors import UserError
from heads.api.features import FeatureSpec
from train.data.loader import PackedBatch
from train.features.store.codec import decode, encode
from train.features.store.copies import copies_to
from train.features.store.layout import LAST, TOP

Content = dict[str, dict[str, Tensor]]
Logits = Callable[[Tensor], Tensor]
"""Last hidden states [M, H] -> the target's logits [M, V]."""
LOGIT_ROWS = 1024


@dataclass(frozen=True)
class Form:
    """How features are stored or sent; top_logits: k, 0 for the last hidden state itself."""

    fmt: str
    hidden: int
    vocab_size: int
    top_logits: int = 0


def batch_on(packed: PackedBatch, device: torch.device) -> TrainBatch:
    """The rows on a device, without features; the seeds stay on the host, where they are read."""
    parts = packed.tensors()
    seeds = parts.pop("seeds")
    moved: dict[str, Any] = copies_to(device)(parts)
    return TrainBatch(**moved, seeds=seeds)


def encode_batch(batch: TrainBatch, taps: tuple[int, ...], form: Form, logits: Logits) -> Content:
    """The features of a batch as they are stored; taps: the layers of `batch.taps`, in order.
    Raises `UserError` for values that are not finite."""
    places = batch.segments > 0
    states: dict[str, Tensor] = {}
    for number, tap in enumerate(taps):
        assert batch.taps is not None, "taps are stored that were not computed"
        states[f"tap.{tap}"] = batch.taps[:, :, number][places]
    if batch.last_hidden is not None:
        states[LAST] = batch.last_hidden[places]
    for name, values in states.items():
        if not bool(torch.isfinite(values).all()):
            raise UserError(
                f"the target's {name} holds values that are not finite numbers, so its features "
                "cannot be stored. Run it in another precision (target.dtype, engine.precision); "
                "float16 overflows for some targets."
            )
    last = states.pop(LAST, None) if form.top_logits else None
    content = {name: encode(values, form.fmt) for name, values in states.items()}
    if last is not None:
        content[TOP] = top_of(last, form.top_logits, logits)
    return content


def join_rows(rows: Sequence[Content]) -> Content:
    """The contents of several runs of tokens, concatenated."""
    if len(rows) == 1:
        return rows[0]
    return {
        thing: {part: _cat([row[thing][part] for row in rows]) for part in parts}
        for thing, parts in rows[0].items()
    }


def _cat(parts: list[Tensor]) -> Tensor:
    """Concatenation, also of fp8, for which torch has no kernel on every device."""
    if parts[0].dtype == torch.float8_e4m3fn:
        return torch.cat([part.view(torch.uint8) for part in parts]).view(torch.float8_e4m3fn)
    return torch.cat(parts)


def to_cpu(content: Content) -> Content:
    return {
        thing: {part: tensor.cpu() for part, tensor in parts.items()}
        for thing, parts in content.items()
    }


def top_of(hidden: Tensor, count: int, logits: Logits) -> dict[str, Tensor]:
    """hidden [N, H] -> values [N, k] float16 falling log-probabilities, ids [N, k] int32, logsumexp
    [N] float32."""
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    for rows in hidden.split(LOGIT_ROWS):
        found = logits(rows).float()
        total = found.logsumexp(-1)
        values, ids = found.topk(count)
        parts.append(((values - total[:, None]).to(torch.float16), ids.int(), total))
    values, ids, total = (torch.cat(column) for column in zip(*parts, strict=True))
    return {"values": values, "ids": ids, "logsumexp": total}


def decode_batch(
    packed: PackedBatch,
    content: Mapping[str, Mapping[str, Tensor]],
    needs: FeatureSpec,
    form: Form,
    device: torch.device,
    dtype: torch.dtype,
    logits: Logits,
) -> TrainBatch:
    """`packed` on `device` with the features in `content`, as `OnlineFeatures.batch` returns it."""
    things = [f"tap.{tap}" for tap in needs.taps]
    if needs.last_hidden or needs.logits:
        things.append(TOP if form.top_logits else LAST)
    # all copies are submitted before the first operation that waits for the device
    batch, copy = batch_on(packed, device), copies_to(device)
    there = {thing: copy(content[thing]) for thing in things}
    places = batch.segments > 0

    def whole(thing: str) -> Tensor:
        return decode(there.pop(thing), form.fmt, form.hidden, dtype)

    taps = None
    if needs.taps:
        taps = torch.zeros(*places.shape, len(needs.taps), form.hidden, dtype=dtype, device=device)
        for number, tap in enumerate(needs.taps):
            taps[:, :, number][places] = whole(f"tap.{tap}")
    last, word = None, logits
    if needs.last_hidden or needs.logits:
        if form.top_logits:
            last, word = packed_top(there.pop(TOP), places), top_word(form)
        else:
            last = torch.zeros(*places.shape, form.hidden, dtype=dtype, device=device)
            last[places] = whole(LAST)
    batch.taps, batch.last_hidden, batch.target_logits = taps, last, word if needs.logits else None
    return batch


def packed_top(parts: Mapping[str, Tensor], places: Tensor) -> Tensor:
    """Parts on the device of `places` [B, T] bool -> [B, T, 2 k + 1] float32: log-probabilities,
    ids (exact below 2^24), logsumexp."""
    values, ids, total = (parts[name].float() for name in ("values", "ids", "logsumexp"))
    full = torch.zeros(*places.shape, 2 * values.shape[1] + 1, device=places.device)
    full[places] = torch.cat([values, ids, total[:, None]], 1)
    return full


def top_word(form: Form) -> Logits:
    """A function that maps rows of `packed_top` [M, 2 k + 1] to logits [M, V]."""
    count, vocab = form.top_logits, form.vocab_size

    def word(rows: Tensor) -> Tensor:
        if rows.shape[-1] != 2 * count + 1:
            raise UserError(
                "this kind computes with the target's last hidden state itself, but the features "
                "hold its largest logits instead. Set features.top_logits=0."
            )
        values, ids, total = rows[..., :count], rows[..., count : 2 * count].long(), rows[..., -1:]
        left = (1.0 - values.exp().sum(-1, keepdim=True)).clamp_min(1e-6)
        rest = (left / max(1, vocab - count)).log()
        spread = rest.expand(*rows.shape[:-1], vocab).clone()
        return spread.scatter(-1, ids, values) + total

    return word
