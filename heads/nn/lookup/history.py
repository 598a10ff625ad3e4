"""The text of every row, for drafters that look tokens up in it instead of computing them (n-gram,
Jacobi, lookahead, suffix).

Legend: B rows, S slots of a row's history, M tokens asked for.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from heads.api.drafter import TargetStates
from heads.api.errors import UserError

_SPREAD = 0x9E3779B1  # odd: multiples of it fall all over the text


@dataclass
class History:
    """tokens [B, S] int64: prompt and answer, the root last; length [B] int64: how many.

    Slots beyond the length hold leftovers and must not be read.
    """

    tokens: Tensor
    length: Tensor

    @classmethod
    def start(cls, seen: TargetStates, max_depth: int, capacity: int) -> History:
        """The history after prefill, with room for `capacity` positions and a draft."""
        batch, width = seen.tokens.shape
        # Padded entries of a commit are written beyond the length, hence the extra room.
        slots = max(capacity, width) + max_depth + 2
        history = cls(seen.tokens.new_zeros(batch, slots), torch.zeros_like(seen.lengths))
        history.tokens[:, :width] = seen.tokens
        history.append(seen)
        return history

    def append(self, run: TargetStates) -> None:
        """Take over a committed run, in place."""
        first = run.positions[:, :1] + 1
        slots = first + torch.arange(run.tokens.shape[1], device=first.device)
        self.tokens.scatter_(1, slots, run.next_tokens)
        self.length.copy_(first[:, 0] + run.lengths)

    @property
    def last(self) -> Tensor:
        """Slots of the roots [B, 1]."""
        return (self.length - 1)[:, None]

    @property
    def root(self) -> Tensor:
        """The newest tokens [B, 1]."""
        return self.tokens.gather(1, self.last)

    def newest(self, count: int) -> Tensor:
        """The last `count` tokens [B, count], the root last; -1 before the text's beginning."""
        slots = self.last + torch.arange(1 - count, 1, device=self.length.device)
        return torch.where(slots >= 0, self.tokens.gather(1, slots.clamp(min=0)), -1)

    def drawn(self, positions: Tensor) -> Tensor:
        """Pseudo-random tokens of the text [B, M], chosen by the positions [B, M] they are for."""
        return self.tokens.gather(1, positions * _SPREAD % self.length[:, None])

    def following(self, tokens: Tensor, otherwise: Tensor) -> Tensor:
        """What followed the last occurrence of each of `tokens` [B, M], else `otherwise` [B, M]."""
        slots = torch.arange(self.tokens.shape[1], device=tokens.device)
        # [B, M, S]
        same = (self.tokens[:, None] == tokens[..., None]) & (slots < self.last)[:, None]
        best, slot = torch.where(same, slots, -1).max(-1)
        return torch.where(best >= 0, self.tokens.gather(1, slot + 1), otherwise)


def require_lengths(kind: str, shortest: int, longest: int) -> None:
    """Raise `UserError` unless 1 <= shortest <= longest: the runs of tokens that count as a match,
    `min_n` and `max_n` of a kind's configuration."""
    if not 1 <= shortest <= longest:
        raise UserError(
            f"{kind} needs 1 <= min_n <= max_n; given min_n={shortest}, max_n={longest}. Change "
            "head.min_n or head.max_n."
        )
