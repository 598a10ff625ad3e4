"""What queries see of a drafter's cache, told in two ways: as bits behind the committed slots, for
a kernel that reads these slots alone, and as a dense mask over all slots, for torch's attention.

Every row of a batch has committed slots, which all queries see, and R drafted or fresh rows behind
them, of which each query sees some. Neither way asks the device how many slots are committed.

Legend: B rows, Q queries, R rows behind the committed slots, S slots, W words of 32 bits, h query
heads, g key/value heads, D head size, E value size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from heads.nn.attention import additive, cache_attention

WORD = 32
"""Bits of a word."""


@dataclass(frozen=True, eq=False)
class Sight:
    """What Q queries see of a cache.

    base [B] int64: slots before it are committed, and stand at the position of their number. Row j
    of the R rows behind them is in slot base + j, at position base + depth[j]; depth [1|B, R]
    int64. at [1|B, Q] int64: the queries stand at positions base + at.
    """

    base: Tensor
    depth: Tensor
    at: Tensor
    _masks: dict[tuple[int, torch.dtype, int], Tensor] = field(
        default_factory=dict, init=False, repr=False
    )

    @property
    def words(self) -> Tensor:
        """[1|B, Q, W] int32: bit j % 32 of word j // 32 says that a query sees row j, as in
        `heads.api.tree.ancestor_words`."""
        raise NotImplementedError

    def allowed(self, place: Tensor) -> Tensor:
        """[B, Q, S] bool: which slots each query sees, but for windows. place [B, S]: the slots'
        numbers, counted from base."""
        raise NotImplementedError

    def mask(self, slots: int, dtype: torch.dtype, window: int = 0) -> Tensor:
        """[B, Q, S] to be added to scores; made once. window: positions that are seen of what lies
        back, a query's own among them; 0: all."""
        key = slots, dtype, window
        if key not in self._masks:
            place = torch.arange(slots, device=self.base.device) - self.base[:, None]
            allowed = self.allowed(place)
            if window:
                rows = self.depth.expand(place.shape[0], -1)
                drafted = rows.gather(1, place.clamp(0, rows.shape[1] - 1))
                stands = torch.where(place < 0, place, drafted)
                allowed = allowed & (stands[:, None] > self.at[..., None] - window)
            self._masks[key] = additive(allowed, dtype)
        return self._masks[key]

    def part(self, span: slice) -> Sight:
        """Of the queries, those of `span`, where the queries are the rows, one by one: they see no
        row behind their own."""
        return _Part(self.base, self.depth[:, : span.stop], self.at[:, span], self, span)


@dataclass(frozen=True, eq=False)
class UpTo(Sight):
    """Each query sees all rows up to the one that stands where it does.

    known: the words, if there are some.
    """

    known: Tensor | None = None

    @classmethod
    def run(cls, slots: Tensor, wanted: Tensor | None = None) -> UpTo:
        """The sight of a run in `slots` [B, R], one behind the other: of all its rows, or of those
        at places `wanted` [B, Q]. A row in another slot may see anything up to that slot."""
        base = slots[:, 0]
        depth = torch.arange(slots.shape[1], device=slots.device)[None]
        at = slots - base[:, None] if wanted is None else (slots - base[:, None]).gather(1, wanted)
        return cls(base, depth, at)

    @cached_property
    def words(self) -> Tensor:
        if self.known is not None:
            return self.known
        first = torch.arange(0, self.depth.shape[1], WORD, device=self.at.device)
        seen = (self.at[..., None] + 1 - first).clamp(0, WORD)  # bits of each word
        # as many ones from below; all 32 are -1 as an int32
        return torch.where(seen == WORD, -1, (1 << seen.clamp(max=WORD - 1)) - 1).to(torch.int32)

    def allowed(self, place: Tensor) -> Tensor:
        return place[:, None] <= self.at[..., None]


@dataclass(frozen=True, eq=False)
class Some(Sight):
    """Queries see the rows whose bits are set."""

    bits: Tensor

    @property
    def words(self) -> Tensor:
        return self.bits

    def allowed(self, place: Tensor) -> Tensor:
        rows = torch.arange(self.depth.shape[1], device=place.device)
        visible = (self.bits[..., rows // WORD] >> (rows % WORD).to(torch.int32)) & 1 == 1
        held = place.clamp(0, rows.shape[0] - 1)[:, None].expand(-1, visible.shape[1], -1)
        drafted = visible.expand(place.shape[0], -1, -1).gather(2, held)
        return ((place < 0)[:, None]) | (drafted & (place < rows.shape[0])[:, None])


@dataclass(frozen=True, eq=False)
class _Part(Sight):
    """Some of the queries of `whole`, with which it shares words and masks."""

    whole: Sight
    span: slice

    @property
    def words(self) -> Tensor:
        return self.whole.words[:, self.span]

    def mask(self, slots: int, dtype: torch.dtype, window: int = 0) -> Tensor:
        return self.whole.mask(slots, dtype, window)[:, self.span]


class CacheKernel(Protocol):
    """Attention over a cache that reads what is seen of it and no more."""

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, sight: Sight, window: int
    ) -> Tensor | None:
        """query [B, Q, h, D], key [B, S, g, D], value [B, S, g, E] -> [B, Q, h * E], scores divided
        by the root of D; None where torch's attention with a mask shall run."""
        ...


_KERNEL: ContextVar[CacheKernel | None] = ContextVar("headstart_cache_kernel", default=None)


@contextmanager
def cache_kernel(kernel: CacheKernel) -> Iterator[None]:
    """Let drafters within the block attend to their caches by `kernel`."""
    token = _KERNEL.set(kernel)
    try:
        yield
    finally:
        _KERNEL.reset(token)


def attend_cache(
    query: Tensor, key: Tensor, value: Tensor, sight: Sight, window: int = 0
) -> Tensor:
    """Attention over a cache, by the kernel of the running block if it takes it; see
    `CacheKernel`."""
    kernel = _KERNEL.get()
    found = None if kernel is None else kernel(query, key, value, sight, window)
    if found is None:
        found = cache_attention(query, key, value, sight.mask(key.shape[1], query.dtype, window))
    return found
