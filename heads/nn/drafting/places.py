"""Where the rows of a draft stand that are run through an autoregressive drafter: their slots in
its cache, their positions and what they see.

Run rows lie behind the committed slots in the order in which they are run, level by level.

Legend: B rows, S cache slots, P nodes run at one level, R nodes run at all levels, W words of 32
bits, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from heads.api.tree import ancestor_words
from heads.nn.drafting.plan import LevelPlan, TreePlan
from heads.nn.drafting.sight import Sight, Some, UpTo
from heads.nn.rope import Rotation, look_up


@dataclass(frozen=True)
class Memory:
    """A drafter's key/value cache, as far as growing a tree must know it.

    base [B] int64: the first slot behind what is committed, and the position of nodes at depth 1 in
    the drafter's own counting; slots before it are seen by all. table [.., 2, D]: rotations of
    every position.
    """

    base: Tensor
    table: Tensor


@dataclass(frozen=True)
class CachePlace:
    """Where the P rows that are run at one level stand: slots [B, P] int64 in the cache, the
    rotation of their positions, and what they see. All empty for drafters without a cache."""

    slots: Tensor
    rotation: Rotation
    sight: Sight

    @classmethod
    def run(cls, slots: Tensor, table: Tensor) -> CachePlace:
        """Rows at positions `slots` [B, P], one behind the other, where each sees everything up to
        itself."""
        return cls(slots, look_up(table, slots), UpTo.run(slots))

    def at(self, level: LevelPlan) -> CachePlace:
        """Of the rows of `static_places`, those run at `level`."""
        (cosine, sine), span = self.rotation, level.span
        return CachePlace(
            self.slots[:, span], (cosine[:, span], sine[:, span]), self.sight.part(span)
        )

    @classmethod
    def nowhere(cls, device: torch.device) -> CachePlace:
        """The place of rows that keep nothing."""
        none = torch.empty(0, device=device)
        return cls(none, (none, none), Sight(none, none, none))


def static_places(plan: TreePlan, memory: Memory) -> CachePlace:
    """Where all R run rows of a static tree stand, for all its levels and layers: row j, a node at
    depth d, in slot base + j and at position base + d - 1."""
    base, depth = memory.base[:, None], (plan.run_depth - 1)[None]
    slots = base + torch.arange(depth.shape[1], device=base.device)
    rows = memory.base, depth, depth
    sight = UpTo(*rows, plan.run_words) if plan.tree.is_chain else Some(*rows, plan.run_words)
    return CachePlace(slots, look_up(memory.table, base + depth), sight)


class GrowingFrame:
    """Where the run rows of a dynamic tree stand. Every level adds `width` rows behind the last
    one's; row j of the level at depth d + 1 is a node at depth d in slot base + (d - 1) * width + j
    and at position base + d - 1, and sees its own ancestors."""

    def __init__(self, memory: Memory, width: int, levels: int) -> None:
        self._memory, self._width, self._level = memory, width, 0
        self._rows = torch.arange(width * levels, device=memory.base.device)
        self._depth = (self._rows // width)[None]
        # [1, R, W]: the bit of each row
        self._own = ancestor_words((self._rows[:, None] == self._rows)[None])
        self._words = self._own  # [B, P, W] of the last level's rows

    def next(self, above: Tensor) -> CachePlace:
        """The next level's place; above [B, P] int64: each row's parent row in the last level."""
        memory, width = self._memory, self._width
        span = slice(self._level * width, (self._level + 1) * width)
        words = self._own[:, span]
        if self._level:
            inherited = self._words.expand(above.shape[0], -1, -1)
            words = words | inherited.gather(1, above[..., None].expand(-1, -1, words.shape[2]))
        self._words, self._level = words, self._level + 1
        base, at = memory.base[:, None], self._depth[:, span]
        sight = Some(memory.base, self._depth[:, : span.stop], at, words)
        return CachePlace(base + self._rows[span], look_up(memory.table, base + at), sight)
