"""What queries see of a drafter's cache, in two forms: as bits for the rows after the committed
slots, for a kernel that reads only visible slots, and as a dense mask over all slots, for torch's
attention.

Every row of a batch has committed slots, which all queries see, and R drafted or fresh rows after
them, of which each query sees some. Neither form has to ask the device how many slots are
committed.

Legend: B rows, Q queries, R rows behind the committed slots, S slots, W words of 32 bits, h query
heads, g key/value heads, D head size, E value size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
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
MASK_ELEMENTS = 1 << 26
"""Most elements of a mask for torch's attention, before queries are split into stretches with a
mask each: the memory for a prompt then does not grow with the square of its length."""


class Sight(Protocol):
    """What Q queries see of a cache.

    base [B] int64: slots before it are committed, and have the position of their number. Row j of
    the R rows after them is in slot base + j, at position base + depth[j]; depth [1|B, R] int64. at
    [1|B, Q] int64: the queries are at positions base + at. words [1|B, Q, W] int32: bit j % 32 of
    word j // 32 says that a query sees row j, as in `heads.api.tree.ancestor_words`.
    """

    @property
    def base(self) -> Tensor: ...

    @property
    def depth(self) -> Tensor: ...

    @property
    def at(self) -> Tensor: ...

    @property
    def words(self) -> Tensor: ...

    def mask(
        self, slots: int, dtype: torch.dtype, window: int = 0, span: slice | None = None
    ) -> Tensor:
        """[B, Q, S] to be added to scores; made once. window: how many latest positions are seen,
        including a query's own; 0: all. span: the mask of these queries alone, which is not
        kept."""
        ...


@dataclass(frozen=True, eq=False)
class _Rows(ABC):
    """The common part of sights. places: shared by masks of one base, made by the first."""

    base: Tensor
    depth: Tensor
    at: Tensor
    places: dict[int, Tensor] = field(default_factory=dict, repr=False, kw_only=True)
    _masks: dict[tuple[int, torch.dtype, int], Tensor] = field(
        default_factory=dict, init=False, repr=False
    )

    @abstractmethod
    def allowed(self, place: Tensor, span: slice) -> Tensor:
        """[B, Q, S] bool: which slots each query of `span` sees, without windows. place [B, S]: the
        slots' numbers, counted from base."""

    def mask(
        self, slots: int, dtype: torch.dtype, window: int = 0, span: slice | None = None
    ) -> Tensor:
        """See `Sight`."""
        if span is not None:
            return self._make_mask(slots, dtype, window, span)
        key = slots, dtype, window
        if key not in self._masks:
            self._masks[key] = self._make_mask(slots, dtype, window, slice(None))
        return self._masks[key]

    def _make_mask(self, slots: int, dtype: torch.dtype, window: int, span: slice) -> Tensor:
        """The mask of the queries of `span`."""
        if slots not in self.places:
            numbers = torch.arange(slots, device=self.base.device)
            self.places[slots] = numbers - self.base[:, None]
        place = self.places[slots]
        allowed = self.allowed(place, span)
        if window:
            rows = self.depth.expand(place.shape[0], -1)
            drafted = rows.gather(1, place.clamp(0, rows.shape[1] - 1))
            stands = torch.where(place < 0, place, drafted)
            allowed = allowed & (stands[:, None] > self.at[:, span, None] - window)
        return additive(allowed, dtype)


@dataclass(frozen=True, eq=False)
class UpTo(_Rows):
    """Each query sees all rows up to the one at its own position.

    known: the words, if already computed.
    """

    known: Tensor | None = None

    @classmethod
    def run(cls, slots: Tensor, wanted: Tensor | None = None) -> UpTo:
        """The sight of a run in consecutive `slots` [B, R]: of all its rows, or of those at places
        `wanted` [B, Q]. A row in another slot may see anything up to that slot."""
        base = slots[:, 0]
        depth = torch.arange(slots.shape[1], device=slots.device)[None]
        at = slots - base[:, None] if wanted is None else (slots - base[:, None]).gather(1, wanted)
        return cls(base, depth, at)

    @classmethod
    def committed(cls, end: Tensor) -> UpTo:
        """The sight of one query per row, at the last slot before end [B]: all slots before it."""
        nothing = end.new_zeros(1, 1)
        return cls(end, nothing, nothing - 1, nothing[None].to(torch.int32))

    @cached_property
    def words(self) -> Tensor:
        if self.known is not None:
            return self.known
        first = torch.arange(0, self.depth.shape[1], WORD, device=self.at.device)
        seen = (self.at[..., None] + 1 - first).clamp(0, WORD)  # bits of each word
        # as many ones from below; all 32 are -1 as an int32
        return torch.where(seen == WORD, -1, (1 << seen.clamp(max=WORD - 1)) - 1).to(torch.int32)

    def allowed(self, place: Tensor, span: slice) -> Tensor:
        return place[:, None] <= self.at[:, span, None]


@dataclass(frozen=True, eq=False)
class StaticTree(_Rows):
    """The sight of all run rows of a static tree, whose `TreePlan` knows both ways; visible [1, R,
    R] bool."""

    words: Tensor
    visible: Tensor

    def allowed(self, place: Tensor, span: slice) -> Tensor:
        return drafted_or_committed(self.visible[:, span], place)


@dataclass(frozen=True, eq=False)
class GrownLevel(_Rows):
    """The sight of a level of P rows that continue those of the level before.

    own: gives the bits of all rows of the tree [1, R, W] int32; above [B, P] int64: each row's
    parent row in the level before. Each form is computed on demand from the same form of that
    level.
    """

    own: Callable[[], Tensor]
    above: Tensor
    before: GrownLevel | None

    @cached_property
    def words(self) -> Tensor:
        end, count = self.depth.shape[1], self.above.shape[1]
        own = self.own()[:, end - count : end]
        if self.before is None:
            return own
        return own | self._inherited(self.before.words)

    @cached_property
    def visible(self) -> Tensor:
        numbers = torch.arange(self.above.shape[1], device=self.above.device)
        own = (numbers[:, None] == numbers).expand(self.above.shape[0], -1, -1)
        if self.before is None:
            return own
        return torch.cat([self._inherited(self.before.visible), own], 2)

    def allowed(self, place: Tensor, span: slice) -> Tensor:
        return drafted_or_committed(self.visible[:, span], place)

    def _inherited(self, last: Tensor) -> Tensor:
        """The parents' entries of [1|B, P, ..]."""
        rows, width = self.above.shape[0], last.shape[2]
        return last.expand(rows, -1, -1).gather(1, self.above[..., None].expand(-1, -1, width))


def drafted_or_committed(visible: Tensor, place: Tensor) -> Tensor:
    """[B, Q, S] bool: the slots of the rows that visible [1|B, Q, R] names, and of all committed
    ones; place [B, S]: the slots' numbers, counted from base."""
    (batch, _), (_, queries, rows) = place.shape, visible.shape
    held = place.clamp(0, rows - 1)[:, None].expand(-1, queries, -1)
    drafted = visible.expand(batch, -1, -1).gather(2, held)
    return (place < 0)[:, None] | (drafted & (place < rows)[:, None])


@dataclass(frozen=True, eq=False)
class Part:
    """The queries of `span` among those of `whole`, which are its rows, one by one. They see no row
    after their own, and share words and masks with the others."""

    whole: Sight
    span: slice

    @property
    def base(self) -> Tensor:
        return self.whole.base

    @property
    def depth(self) -> Tensor:
        return self.whole.depth[:, : self.span.stop]

    @property
    def at(self) -> Tensor:
        return self.whole.at[:, self.span]

    @property
    def words(self) -> Tensor:
        return self.whole.words[:, self.span]

    def mask(
        self, slots: int, dtype: torch.dtype, window: int = 0, span: slice | None = None
    ) -> Tensor:
        """See `Sight`."""
        if span is None:
            return self.whole.mask(slots, dtype, window)[:, self.span]
        first = self.span.start
        return self.whole.mask(slots, dtype, window, slice(first + span.start, first + span.stop))


class CacheKernel(Protocol):
    """Attention over a cache that reads only the visible part of it."""

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, sight: Sight, window: int
    ) -> Tensor | None:
        """query [B, Q, h, D], key [B, S, g, D], value [B, S, g, E] -> [B, Q, h * E], scores divided
        by the root of D; None if torch's attention with a mask must run instead."""
        ...


_KERNEL: ContextVar[CacheKernel | None] = ContextVar("headstart_cache_kernel", default=None)


@contextmanager
def cache_kernel(kernel: CacheKernel) -> Iterator[None]:
    """Make drafters within the block attend to their caches with `kernel`."""
    token = _KERNEL.set(kernel)
    try:
        yield
    finally:
        _KERNEL.reset(token)


def attend_cache(
    query: Tensor, key: Tensor, value: Tensor, sight: Sight, window: int = 0
) -> Tensor:
    """Attention over a cache, with the kernel of the running block if it accepts it; see
    `CacheKernel`."""
    kernel = _KERNEL.get()
    found = None if kernel is None else kernel(query, key, value, sight, window)
    return _masked_attention(query, key, value, sight, window) if found is None else found


def _masked_attention(
    query: Tensor, key: Tensor, value: Tensor, sight: Sight, window: int
) -> Tensor:
    """Torch's attention over a cache, for a stretch of the queries after another if their masks
    would be too large."""
    (batch, queries, heads, _), (_, slots, kv_heads, _) = query.shape, key.shape
    # queries that share a key/value head have a copy of the mask each
    longest = max(1, MASK_ELEMENTS // (batch * slots * (heads // kv_heads)))
    if queries <= longest:
        return cache_attention(query, key, value, sight.mask(slots, query.dtype, window))
    found = []
    for first in range(0, queries, longest):
        span = slice(first, min(first + longest, queries))
        mask = sight.mask(slots, query.dtype, window, span)
        found.append(cache_attention(query[:, span], key, value, mask))
    return torch.cat(found, 1)
