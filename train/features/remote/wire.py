"""The protocol between trainers and feature servers over HTTP.

    GET  /identity   -> JSON: `format`, `target` (facts), `precision`, `loading`, `key`
    POST /features   <- safetensors: tokens, positions, segments [b, T] int32; headers with `key`
                     and, as JSON, the requested features
                     -> safetensors: `<thing>.<part>` over the rows' tokens without padding, as in a
                     store's shard -> or JSON `error`, in OpenAI's shape as everywhere, with a
                     status of 400 and above

`key` stands for the target, its tokenizer, the precision it runs in, and how it is loaded
(`inference.target.settings.loading_text`; left out at the defaults, as in earlier versions); a
server that was restarted with another target refuses. Nothing is pickled, and every answer begins
with its length.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass

import torch
from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load

from heads.api.errors import UserError
from heads.api.features import FeatureSpec
from heads.api.target_info import TargetInfo
from train.data.loader import PackedBatch
from train.features.base import FeatureTarget, OnlineFeatures
from train.features.store.batches import Content, Form, encode_batch
from train.features.store.codec import check_format

FORMAT = 1
KEY_HEADER, ASK_HEADER = "X-Headstart-Key", "X-Headstart-Ask"
LARGEST_REQUEST = 1 << 24
"""Bytes of a request: 1.4 million positions."""
MOST_HELD = 1 << 28
"""Bytes of all requests that a server holds."""
LONGEST_ASK = 4096
"""Characters of the header with the requested features."""
ROWS = ("tokens", "positions", "segments")


@dataclass(frozen=True)
class Ask:
    """The requested features and their form."""

    taps: tuple[int, ...]
    last_hidden: bool
    format: str
    top_logits: int

    @classmethod
    def of(cls, needs: FeatureSpec, form: Form) -> Ask:
        """The request of a training with `needs`."""
        return cls(needs.taps, needs.last_hidden or needs.logits, form.fmt, form.top_logits)

    @property
    def needs(self) -> FeatureSpec:
        return FeatureSpec(self.taps, last_hidden=self.last_hidden)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str, info: TargetInfo) -> Ask:
        """Raises `UserError` for anything that this target cannot give."""
        if len(text) > LONGEST_ASK:
            raise UserError(f"the header {ASK_HEADER} has more than {LONGEST_ASK} characters.")
        try:
            ask = ASK.validate_json(text, strict=True)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            what = f"{where}: {first['msg']}" if where else first["msg"]
            raise UserError(f"the header {ASK_HEADER} is not readable ({what}).") from error
        check_format(ask.format)
        ask.needs.check(info.num_layers)
        if not 0 <= ask.top_logits < info.vocab_size:
            raise UserError(
                f"top_logits {ask.top_logits} must lie between 0 and {info.vocab_size - 1}."
            )
        return ask


ASK = TypeAdapter(Ask)


def key_of(info: TargetInfo, precision: str, loading: str) -> str:
    """The key that both sides must agree on."""
    facts = [info.revision, info.tokenizer_hash, info.hidden_size, info.num_layers, precision]
    text = json.dumps([FORMAT, *facts, *([loading] if loading else [])])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def compute(
    target: FeatureTarget, dtype: torch.dtype, ask: Ask, packed: PackedBatch
) -> tuple[Content, Form]:
    """The requested features, in `dtype` before they are encoded, on the target's device, and their
    form."""
    info = target.info
    form = Form(ask.format, info.hidden_size, info.vocab_size, ask.top_logits)
    online = OnlineFeatures(target, ask.needs, dtype)
    return encode_batch(online.batch(packed), ask.taps, form, online.logits), form


def unpack_rows(body: bytes, info: TargetInfo) -> PackedBatch:
    """The rows of a request; raises `UserError` if they are not valid rows for this target."""
    try:
        parts = load(body)
        tokens, positions, segments = (parts[name] for name in ROWS)
    except (SafetensorError, KeyError, ValueError) as error:
        raise UserError(f"the request holds no rows ({error}).") from error
    kinds = {(part.shape, part.dtype) for part in parts.values()}
    if kinds != {(tokens.shape, torch.int32)} or tokens.dim() != 2 or not tokens.numel():
        raise UserError(
            "tokens, positions and segments must be int32 of one shape [rows, positions]."
        )
    if int(tokens.min()) < 0 or int(tokens.max()) >= info.vocab_size:
        raise UserError(
            f"token ids must lie in 0..{info.vocab_size - 1}, the vocabulary of '{info.id}'."
        )
    limit = info.max_position_embeddings
    if int(positions.min()) < 0 or int(positions.max()) >= limit:
        raise UserError(f"positions must lie in 0..{limit - 1}, which is what '{info.id}' takes.")
    return PackedBatch.unsupervised(tokens, positions, segments)
