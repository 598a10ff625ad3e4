"""The places of a draft's rows that are run through an autoregressive drafter: their slots in its
cache, their positions and what they see.

Run rows come after the committed slots in the order in which they are run, level by level.

Legend: B rows, S cache slots, P nodes run at one level, R nodes run at all levels, W words of 32
bits, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from heads.nn.drafting.plan import LevelPlan, TreePlan
from heads.nn.drafting.sight import WORD, GrownLevel, Part, Sight, StaticTree, UpTo
from heads.nn.rope import Rotation, look_up


@dataclass(frozen=True)
class Memory:
    """The facts of a drafter's key/value cache that are needed to grow a tree.

    base [B] int64: the first slot after the committed ones, and the position of nodes at depth 1 in
    the drafter's own counting; all rows see the slots before it. table [.., 2, D]: rotations of
    every position.
    """

    base: Tensor
    table: Tensor


@dataclass(frozen=True)
class CachePlace:
    """The place of the P rows that are run at one level: slots [B, P] int64 in the cache, the
    rotation of their positions, and what they see. All empty for drafters without a cache."""

    slots: Tensor
    rotation: Rotation
    sight: Sight

    @classmethod
    def run(cls, slots: Tensor, table: Tensor) -> CachePlace:
        """Consecutive rows at positions `slots` [B, P], each of which sees everything up to
        itself."""
        return cls(slots, look_up(table, slots), UpTo.run(slots))

    def at(self, level: LevelPlan) -> CachePlace:
        """The rows of `static_places` that are run at `level`."""
        (cosine, sine), span = self.rotation, level.span
        rotation = cosine[:, span], sine[:, span]
        return CachePlace(self.slots[:, span], rotation, Part(self.sight, span))

    @classmethod
    def nowhere(cls, device: torch.device) -> CachePlace:
        """The place of rows that keep nothing."""
        none = torch.empty(0, device=device)
        return cls(none, (none, none), UpTo(none, none, none))


def static_places(plan: TreePlan, memory: Memory) -> CachePlace:
    """The place of all R run rows of a static tree, for all its levels and layers: row j, a node at
    depth d, is in slot base + j and at position base + d - 1."""
    base, depth = memory.base[:, None], (plan.run_depth - 1)[None]
    slots = base + torch.arange(depth.shape[1], device=base.device)
    rows = memory.base, depth, depth
    sight: Sight = UpTo(*rows, plan.run_words)
    if not plan.tree.is_chain:
        sight = StaticTree(*rows, plan.run_words, plan.run_visible)
    return CachePlace(slots, look_up(memory.table, base + depth), sight)


class GrowingFrame:
    """The places of a dynamic tree's run rows. Every level adds `width` rows after the last one's.
    Row j of the level at depth d + 1 is a node at depth d in slot base + (d - 1) * width + j and at
    position base + d - 1, and sees its own ancestors."""

    def __init__(self, memory: Memory, width: int, levels: int) -> None:
        self._memory, self._width, self._level = memory, width, 0
        self._rows = torch.arange(width * levels, device=memory.base.device)
        self._depth = (self._rows // width)[None]
        self._places: dict[int, Tensor] = {}
        self._last: GrownLevel | None = None

    @cached_property
    def own(self) -> Tensor:
        """The bit of each row [1, R, W] int32, as in `heads.api.tree.ancestor_words`."""
        rows = self._rows.to(torch.int32)[:, None]
        words = torch.arange(-(-rows.shape[0] // WORD), device=rows.device)
        bits = torch.ones_like(rows) << (rows % WORD)
        return torch.where(rows // WORD == words, bits, 0)[None]

    def next(self, above: Tensor) -> CachePlace:
        """The next level's place; above [B, P] int64: each row's parent row in the last level."""
        memory, width = self._memory, self._width
        span = slice(self._level * width, (self._level + 1) * width)
        self._level += 1
        base, at = memory.base[:, None], self._depth[:, span]
        rows = memory.base, self._depth[:, : span.stop], at
        self._last = GrownLevel(*rows, lambda: self.own, above, self._last, places=self._places)
        rotation = look_up(memory.table, base + at)
        return CachePlace(base + self._rows[span], rotation, self._last)
