"""What a training reads of a prepared folder: windows of token streams, the held-out loss."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from heads.api.errors import UserError
from scripts.assets.tokens import ASSISTANT_ID, BOS_ID, END_ID, load_stream

SNAP = 384
"""A window starts at the next document when one begins within this many tokens."""


def load_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of a prepared folder; UserError where there is none."""
    path = folder / "manifest.json"
    if not path.is_file():
        raise UserError(
            f"{folder} is not a prepared folder: it has no manifest.json. Make one with "
            f"`prepare --out {folder}`."
        )
    manifest: dict[str, Any] = json.loads(path.read_text())
    return manifest


class Stream:
    """One token stream [tokens] on a device, from which windows of `length` + 1 tokens are drawn.

    All of it is resident (some 150 MB), so that a batch costs one gather and no copy from the host.
    """

    def __init__(self, ids: np.ndarray, length: int, device: torch.device) -> None:
        signed = torch.from_numpy(
            ids.astype(np.int16)
        )  # ids < 4096 fit; int16 indexes on every backend
        if len(signed) <= length + 1:
            signed = signed.repeat(-(-(length + 2) // max(1, len(signed))))
        self.ids = signed.to(device)
        starts = (signed == BOS_ID).nonzero().squeeze(-1)
        self.last = len(signed) - length - 1
        self.starts = torch.cat((starts[starts <= self.last], torch.tensor([self.last]))).to(device)
        self.offsets = torch.arange(length + 1, device=device)

    def windows(self, rows: int, generator: torch.Generator) -> Tensor:
        """Return [rows, length + 1] int64, each row from a random place or the document that begins
        soon after it.
        """
        start = torch.randint(self.last + 1, (rows,), generator=generator, device=self.ids.device)
        soon = self.starts[torch.searchsorted(self.starts, start)]
        start = torch.where(soon - start < SNAP, soon, start)
        return self.ids[start.unsqueeze(1) + self.offsets].long()


def assistant_mask(ids: np.ndarray) -> np.ndarray:
    """Return [tokens] bool: the assistant's tokens and the end of its turn, for whole
    conversations.
    """
    position = np.arange(len(ids))
    opened = np.maximum.accumulate(np.where(ids == ASSISTANT_ID, position, -1))
    closed = np.maximum.accumulate(np.where(ids == END_ID, position, -1))
    before = np.concatenate(([-1], closed[:-1])) if len(ids) else closed
    return (opened > before) & (opened < position)


@dataclasses.dataclass(frozen=True)
class HeldOut:
    """A held-out stream: ids [windows, length + 1] int64, `counted` [windows, length] bool on the
    targets.

    Windows overlap by one token, so that every token but the first is predicted once. `bytes` are
    those that the counted targets decode to.
    """

    ids: Tensor
    counted: Tensor
    bytes: int

    @classmethod
    def cut(
        cls,
        ids: np.ndarray,
        counted: np.ndarray,
        sizes: np.ndarray,
        length: int,
        limit: int | None = None,
    ) -> HeldOut:
        """Cut a stream; `counted` [tokens] bool, `sizes` [V] bytes per token, `limit` tokens at
        most.
        """
        if limit is not None:
            ids, counted = ids[: limit + 1], counted[: limit + 1]
        windows = max(1, -(-(len(ids) - 1) // length))
        padded = np.zeros(windows * length + 1, dtype=np.int64)
        marks = np.zeros(windows * length + 1, dtype=bool)
        padded[: len(ids)], marks[: len(ids)] = ids, counted
        marks[0] = False
        at = np.arange(windows)[:, None] * length + np.arange(length + 1)
        total = int(sizes[padded[marks]].sum())
        return cls(torch.from_numpy(padded[at]), torch.from_numpy(marks[at][:, 1:]), total)


def load_heldout(folder: Path, length: int, limit: int | None = None) -> dict[str, HeldOut]:
    """Return the windows of group B: `code` (tokens of documents), `chat` (assistant tokens)."""
    manifest = load_manifest(folder)
    sizes = np.array(manifest["token_bytes"])
    code, chat = (load_stream(folder, manifest, name) for name in ("heldout-raw", "heldout-chat"))
    return {
        "code": HeldOut.cut(code, sizes[code] > 0, sizes, length, limit),
        "chat": HeldOut.cut(chat, assistant_mask(chat), sizes, length, limit),
    }


def token_losses(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return (negative log likelihood, log normaliser), both [B, T] float32, of logits [B, T, V]
    and targets [B, T] int64.
    """
    wide = logits.float()
    normaliser = torch.logsumexp(wide, dim=-1)
    return normaliser - wide.gather(-1, targets.unsqueeze(-1)).squeeze(-1), normaliser


@torch.no_grad()
def evaluate(
    model: Any, heldout: Mapping[str, HeldOut], rows: int = 32, bf16: bool = False
) -> dict[str, float]:
    """Return each stream's `_bits_per_byte`, `_loss` (nats per token) and `_top1` (share right)."""
    device, result = model.device, {}
    for name, part in heldout.items():
        total = torch.zeros((), dtype=torch.float64, device=device)
        right = torch.zeros((), dtype=torch.float64, device=device)
        for start in range(0, len(part.ids), rows):
            ids = part.ids[start : start + rows].to(device)
            counted = part.counted[start : start + rows].to(device)
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=bf16):
                logits = model(ids[:, :-1], use_cache=False).logits
            total += (token_losses(logits, ids[:, 1:])[0] * counted).sum()
            right += ((logits.argmax(-1) == ids[:, 1:]) & counted).sum()
        tokens = max(1, int(part.counted.sum()))
        result[f"{name}_bits_per_byte"] = total.item() / math.log(2) / max(1, part.bytes)
        result[f"{name}_loss"] = total.item() / tokens
        result[f"{name}_top1"] = right.item() / tokens
    return {key: round(value, 5) for key, value in result.items()}
