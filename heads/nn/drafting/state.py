"""The states that drafters keep for a batch's rows between verifications.

Legend: B rows, T positions, S cache slots, Q queries, g key/value heads, h query heads, D head
size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from heads.api.drafter import TargetStates
from heads.nn.drafting.plan import Plan
from heads.nn.drafting.sight import Sight, attend_cache
from heads.nn.rope import Rope


@dataclass
class Rooted:
    """root, root_position [B] int64: the last committed token and its position."""

    root: Tensor
    root_position: Tensor
    plan: Plan

    @classmethod
    def after(cls, run: TargetStates, plan: Plan) -> Rooted:
        """The state after a committed run, for drafters that keep nothing else."""
        _, _, root, root_position = last_valid(run)
        return cls(root, root_position, plan)

    @property
    def rows(self) -> Tensor:
        """The numbers of the rows [B, 1] int64."""
        return torch.arange(self.root.shape[0], device=self.root.device)[:, None]

    def advance(self, run: TargetStates) -> tuple[Tensor, Tensor]:
        """Move past a committed run, in place -> row and place [B, 1] of its last valid entry."""
        rows, last, root, root_position = last_valid(run)
        self.root.copy_(root)
        self.root_position.copy_(root_position)
        return rows[:, None], last[:, None]


@dataclass
class Cached(Rooted):
    """A state with the drafter's own key/value cache.

    keys, values: per layer [B, S, g, D] (values may be of another size); after the committed
    positions there is room for drafts, which are written before they are read. output [B, ...]: the
    result of the last commit, from which drafting continues.
    """

    output: Tensor
    keys: list[Tensor]
    values: list[Tensor]
    behind_root: ClassVar[tuple[str, ...]] = ("keys", "values")  # what a cascade need not put back

    @classmethod
    def empty(
        cls,
        seen: TargetStates,
        plan: Plan,
        output: Tensor,
        caches: Sequence[Tensor],
        values: Sequence[Tensor] | None = None,
    ) -> Cached:
        """The state before any run. output: zeros; caches: zeros [B, S, g, D] per layer, for its
        keys; values: the same for its values, if these are of another size."""
        root = torch.zeros_like(seen.tokens[:, 0])
        values = [torch.zeros_like(k) for k in caches] if values is None else list(values)
        return cls(root, torch.zeros_like(root), plan, output, list(caches), values)

    @property
    def slots(self) -> int:
        """The number of slots S."""
        return self.keys[0].shape[1]

    def rotations(self, rope: Rope) -> Tensor:
        """The table of `rope` for all slots, in the dtype of the keys (see `Rope.table`)."""
        return rope.table(self.slots, self.keys[0].device, self.keys[0].dtype)

    def store(self, layer: int, rows: Tensor, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Write keys and values [B, Q, g, D] of a layer to `slots` [B, Q] of `rows` [B, 1]."""
        self.keys[layer][rows, slots] = key
        self.values[layer][rows, slots] = value

    def attend(self, layer: int, query: Tensor, sight: Sight, window: int = 0) -> Tensor:
        """Attention over a layer's cache: query [B, Q, h, D] -> [B, Q, h * D], D the size of a
        value. window: see `Sight.mask`."""
        return attend_cache(query, self.keys[layer], self.values[layer], sight, window)


def last_valid(states: TargetStates) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The end of a run of states: (rows [B], last [B], root token [B], root position [B]).

    `values[rows, last]` reads each row's last valid entry.
    """
    last = states.lengths - 1
    rows = torch.arange(last.shape[0], device=last.device)
    return rows, last, states.next_tokens[rows, last], states.positions[rows, last] + 1


def run_slots(run: TargetStates) -> Tensor:
    """Positions [B, T] of a run's entries, counted on through padding: its cache slots."""
    places = torch.arange(run.tokens.shape[1], device=run.tokens.device)
    return run.positions[:, :1] + places
