"""A drafter's memory of earlier answers: one ring of tokens per row of the batch.

Every row writes its answers into its own ring, one after the other, so that answers of different
rows do not mix; all rows search all rings. The rings belong to the drafter: they outlive requests
and batches. Barriers, which equal no token, separate answers, mark slots that were never written,
and fill the slot of the next token, so that no match extends across them.

Legend: B rows of the batch, R rings (at least B), A slots of a ring, T positions, C tokens of a
prompt's end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from heads.api.drafter import TargetStates
from heads.nn.lookup.history import History

BARRIER = -2
"""Separates answers. Not -1, which `History.newest` returns before a text's beginning."""


@dataclass
class Archive:
    """tokens [R, A + 1] int64, the last column for tokens not kept; cursor [R]: next slot."""

    tokens: Tensor
    cursor: Tensor
    shared_between_rows: ClassVar[bool] = True

    @classmethod
    def of(cls, rows: int, slots: int, device: torch.device, old: Archive | None) -> Archive:
        """Rings of `slots` tokens for `rows` rows, the first as in `old` (of equal size)."""
        tokens = torch.full((rows, slots + 1), BARRIER, dtype=torch.int64, device=device)
        archive = cls(tokens, torch.zeros(rows, dtype=torch.int64, device=device))
        if old is not None:
            rings = min(rows, old.rings)
            tokens[:rings] = old.tokens[:rings].to(device)
            archive.cursor[:rings] = old.cursor[:rings].to(device)
        return archive

    @property
    def rings(self) -> int:
        return self.tokens.shape[0]

    @property
    def slots(self) -> int:
        return self.tokens.shape[1] - 1

    @property
    def ring(self) -> Tensor:
        """The tokens [R, A], barriers included."""
        return self.tokens[:, : self.slots]

    def age(self) -> Tensor:
        """How many tokens were written into each slot's ring after it [R, A]."""
        slot = torch.arange(self.slots, device=self.cursor.device)
        return (self.cursor[:, None] - 1 - slot) % self.slots

    def forget(self) -> None:
        """Drop everything, in place."""
        self.tokens.fill_(BARRIER)


@dataclass
class Writing:
    """The place of a row's present answer in its ring: expected [B] int64, the position of the
    token to be written next; slots [B] int64: slots taken so far, 0 before the first; ring [B]
    int64: the ring in which they are. A row that was moved in the batch begins again in the ring of
    its new place, whose last tokens are another answer's."""

    expected: Tensor
    slots: Tensor
    ring: Tensor

    @classmethod
    def start(cls, history: History) -> Writing:
        rows = torch.arange(history.length.shape[0], device=history.length.device)
        return cls(history.length - 1, torch.zeros_like(history.length), rows)

    @property
    def written(self) -> Tensor:
        """Slots of the present answer in the ring of the row's present place [B]."""
        here = torch.arange(self.ring.shape[0], device=self.ring.device)
        return torch.where(self.ring == here, self.slots, 0)

    def append(self, archive: Archive, history: History, run: TargetStates, context: int) -> None:
        """Append the run's tokens to the row's present answer, in place; an answer begins with a
        barrier and the `context` tokens before it.

        The tokens that the target has read are written (the root and the accepted drafts, not yet
        the bonus). A row that has ended passes the same root repeatedly; it is written once.
        """
        rows, slots, written = self.expected.shape[0], archive.slots, self.written
        first = run.positions[:, :1]
        keeps = run.valid & (first == self.expected[:, None])
        begins = keeps[:, :1] & (written == 0)[:, None]
        before = first + torch.arange(-context - 1, 0, device=first.device)
        lead = torch.where(before >= 0, history.tokens.gather(1, before.clamp(min=0)), BARRIER)
        lead[:, 0].fill_(BARRIER)
        items = torch.cat([lead, run.tokens], 1)
        kept = torch.cat([begins.expand_as(lead), keeps], 1)
        cursor = archive.cursor[:rows, None]
        place = (cursor + kept.cumsum(1) - 1) % slots
        archive.tokens[:rows].scatter_(1, torch.where(kept, place, slots), items)
        count = kept.sum(1)
        archive.cursor[:rows].copy_((cursor[:, 0] + count) % slots)
        archive.tokens[:rows].scatter_(1, archive.cursor[:rows, None], BARRIER)
        self.expected.add_(keeps.sum(1))
        self.slots.copy_(written + count)
        self.ring.copy_(torch.arange(rows, device=self.ring.device))
