"""A pool of n-grams per row, found by their first token: the memory of lookahead decoding.

Every row has a ring of M n-grams, whatever the vocabulary; one that is collected again moves to the
newest place. All shapes are fixed and nothing synchronises with the device.

Legend: B rows, M n-grams of a row, n tokens of an n-gram, C n-grams collected, G n-grams asked for.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_MIX = 0x5851F42D4C957F2D  # odd: products with it tell n-grams apart by their 64 bits


@dataclass
class NgramPool:
    """grams [B, M + 1, n] int64, -1 where empty; n-grams that are not kept go to the last place;
    keys [B, M + 1] int64, a hash of each; cursor [B] int64: the place that is written next."""

    grams: Tensor
    keys: Tensor
    cursor: Tensor

    @classmethod
    def empty(cls, rows: int, size: int, n: int, device: torch.device) -> NgramPool:
        grams = torch.full((rows, size + 1, n), -1, dtype=torch.int64, device=device)
        return cls(grams, torch.full_like(grams[..., 0], -1), torch.zeros_like(grams[:, 0, 0]))

    @property
    def size(self) -> int:
        return self.grams.shape[1] - 1

    def add(self, grams: Tensor, kept: Tensor) -> None:
        """Collect grams [B, C, n] where `kept` [B, C], the last as the newest. C is at most M.

        Of equal ones (by 64-bit hashes) the last is kept; a collision loses one n-gram.
        """
        keys = _hash(grams)
        order = torch.arange(keys.shape[1], device=keys.device)
        later = order[:, None] < order
        again = (keys[..., None] == keys[:, None]) & kept[:, None] & later
        kept = kept & ~again.any(-1)
        known = ((self.keys[..., None] == keys[:, None]) & kept[:, None]).any(-1)  # [B, M + 1]
        self.grams.masked_fill_(known[..., None], -1)
        self.keys.masked_fill_(known, -1)
        place = (self.cursor[:, None] + kept.cumsum(1) - 1) % self.size
        place = torch.where(kept, place, self.size)
        self.grams.scatter_(1, place[..., None].expand_as(grams), grams)
        self.keys.scatter_(1, place, keys)
        self.cursor.copy_((self.cursor + kept.sum(1)) % self.size)

    def starting_with(self, tokens: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The newest `count` n-grams that start with tokens [B], newest first: their other tokens
        [B, G, n - 1] and whether there is one [B, G]."""
        place = torch.arange(self.size, device=tokens.device)
        recency = (place - self.cursor[:, None]) % self.size
        same = self.grams[:, : self.size, 0] == tokens[:, None]
        best, found = torch.where(same, recency, -1).topk(count, 1)
        rows = torch.arange(tokens.shape[0], device=tokens.device)[:, None]
        return self.grams[rows, found, 1:], best >= 0


def _hash(grams: Tensor) -> Tensor:
    """A hash [B, C] int64 of n-grams [B, C, n]; never -1."""
    found = torch.zeros_like(grams[..., 0])
    for token in grams.unbind(-1):
        found = (found + token + 1) * _MIX  # wraps
        found = found ^ (found >> 29)
    return found & ((1 << 62) - 1)
