"""The held-out loss: bits per byte on source code, nats per token on assistant tokens of conversations."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from scripts.tiny_target.data import assistant_mask, load_stream
from scripts.tiny_target.model import token_losses


@dataclasses.dataclass(frozen=True)
class HeldOut:
    """Windows of a held-out stream: ids [windows, length + 1] int64, `counted` [windows, length] bool on the targets.

    Windows overlap by one token, so that every token but the first is predicted once. `bytes` are those that the counted targets
    decode to.
    """

    ids: Tensor
    counted: Tensor
    bytes: int


def cut(ids: np.ndarray, counted: np.ndarray, sizes: np.ndarray, length: int, limit: int | None) -> HeldOut:
    """Return the windows of a stream; `counted` [tokens] bool, `sizes` [V] bytes per token, `limit` tokens at most."""
    if limit is not None:
        ids, counted = ids[: limit + 1], counted[: limit + 1]
    windows = max(1, -(-(len(ids) - 1) // length))
    padded = np.zeros(windows * length + 1, dtype=np.int64)
    marks = np.zeros(windows * length + 1, dtype=bool)
    padded[: len(ids)], marks[: len(ids)] = ids, counted
    marks[0] = False
    at = np.arange(windows)[:, None] * length + np.arange(length + 1)
    return HeldOut(torch.from_numpy(padded[at]), torch.from_numpy(marks[at][:, 1:]), int(sizes[padded[marks]].sum()))


def load_heldout(folder: Path, manifest: dict[str, Any], length: int, limit: int | None = None) -> dict[str, HeldOut]:
    """Return the held-out windows of group B: `code` (text tokens of Python files) and `chat` (assistant tokens)."""
    sizes = np.array(manifest["token_bytes"])
    code = load_stream(folder, manifest, "heldout-raw")
    chat = load_stream(folder, manifest, "heldout-chat")
    return {
        "code": cut(code, sizes[code] > 0, sizes, length, limit),
        "chat": cut(chat, assistant_mask(chat), sizes, length, limit),
    }


@torch.no_grad()
def evaluate(
    model: nn.Module, heldout: dict[str, HeldOut], device: torch.device, rows: int = 32, bf16: bool = False
) -> dict[str, float]:
    """Return `code_bits_per_byte`, `chat_loss` (nats per assistant token), `chat_bits_per_byte`, `chat_top1` (share right)."""
    result = {}
    for name, part in heldout.items():
        total = torch.zeros((), dtype=torch.float64, device=device)
        right = torch.zeros((), dtype=torch.float64, device=device)
        for start in range(0, len(part.ids), rows):
            ids = part.ids[start : start + rows].to(device)
            counted = part.counted[start : start + rows].to(device)
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=bf16):
                logits = model(ids[:, :-1])
            losses, _ = token_losses(logits, ids[:, 1:])
            total += (losses * counted).sum()
            right += ((logits.argmax(-1) == ids[:, 1:]) & counted).sum()
        tokens = int(part.counted.sum())
        result[f"{name}_bits_per_byte"] = total.item() / math.log(2) / max(1, part.bytes)
        result[f"{name}_loss"] = total.item() / max(1, tokens)
        result[f"{name}_top1"] = right.item() / max(1, tokens)
    return {key: round(value, 5) for key, value in result.items()}
