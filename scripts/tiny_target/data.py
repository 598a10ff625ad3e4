"""Token streams of a prepared folder on the training device, and the windows drawn from them.

Everything is resident (some 150 MB), so that a batch costs one gather on the device and no host copy.
"""

from __future__ import annotations

import json
import lzma
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from heads.api.errors import UserError
from scripts.tiny_target.vocabulary import ASSISTANT_ID, BOS_ID, END_ID

SNAP = 384  # a window starts at the next document when one begins within this many tokens


def load_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of a prepared folder; UserError where there is none."""
    path = folder / "manifest.json"
    if not path.is_file():
        raise UserError(f"{folder} is not a prepared folder: it has no manifest.json. Make one with `prepare --out {folder}`.")
    manifest: dict[str, Any] = json.loads(path.read_text())
    return manifest


def load_stream(folder: Path, manifest: dict[str, Any], name: str) -> np.ndarray:
    """Return one token stream [tokens] uint16, its xz files read in parallel."""
    entry = manifest["streams"][name]
    with ThreadPoolExecutor() as pool:
        parts = list(pool.map(lambda file: lzma.decompress((folder / Path(file).name).read_bytes()), entry["files"]))
    ids = np.frombuffer(b"".join(parts), dtype="<u2")
    if len(ids) != entry["tokens"]:
        raise UserError(f"stream {name} in {folder} has {len(ids)} tokens, its manifest says {entry['tokens']}: prepare again.")
    return ids


class Stream:
    """One token stream on a device, from which windows of `length` + 1 tokens are drawn."""

    def __init__(self, ids: np.ndarray, length: int, device: torch.device) -> None:
        signed = torch.from_numpy(ids.astype(np.int16))  # ids < 4096 fit; int16 indexes on every backend
        if len(signed) <= length + 1:
            signed = signed.repeat(-(-(length + 2) // max(1, len(signed))))
        self.ids = signed.to(device)
        self.length = length
        starts = (signed == BOS_ID).nonzero().squeeze(-1)
        self.last = len(signed) - length - 1
        self.starts = torch.cat((starts[starts <= self.last], torch.tensor([self.last]))).to(device)
        self.offsets = torch.arange(length + 1, device=device)

    def windows(self, rows: int, generator: torch.Generator) -> Tensor:
        """Return [rows, length + 1] int64 ids, each row from a random place or the document that begins soon after it."""
        start = torch.randint(self.last + 1, (rows,), generator=generator, device=self.ids.device)
        soon = self.starts[torch.searchsorted(self.starts, start)]
        start = torch.where(soon - start < SNAP, soon, start)
        return self.ids[start.unsqueeze(1) + self.offsets].long()


def assistant_mask(ids: np.ndarray) -> np.ndarray:
    """Return [tokens] bool: True on the assistant's tokens and the <|end|> after them, for a stream of whole conversations."""
    position = np.arange(len(ids))
    opened = np.maximum.accumulate(np.where(ids == ASSISTANT_ID, position, -1))
    closed = np.maximum.accumulate(np.where(ids == END_ID, position, -1))
    before = np.concatenate(([-1], closed[:-1])) if len(ids) else closed
    return (opened > before) & (opened < position)
