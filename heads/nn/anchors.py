"""Places of a sequence behind which a drafter is trained, drawn at random: training behind some of
them costs less, and their scaled sum estimates the sum over all.

Legend: B rows, T positions, A anchors per row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from heads.nn import chunks


@dataclass(frozen=True)
class Anchors:
    """The places of a batch's blocks, or of other drafts.

    last [B, A] int64: the last visible position t of each block; its root is the token at t + 1.
    valid [B, A] bool: False for fillers of rows with fewer blocks. scale [B, A] float: the factor
    of each block's loss, so that a sum over the chosen blocks is an estimate of the (weighted) sum
    over all eligible positions.
    """

    last: Tensor
    valid: Tensor
    scale: Tensor

    def piece(self, first: int, count: int) -> Anchors:
        """`count` blocks of every row from number `first` on."""
        span = slice(first, first + count)
        return Anchors(self.last[:, span], self.valid[:, span], self.scale[:, span])

    def in_chunks(self, size: int) -> Anchors:
        """The same, with as many fillers after them as it takes to have a block in every chunk of
        `size` blocks per row that is run (`heads.nn.chunks`)."""
        width = self.last.shape[1]
        short = (chunks.agreed(-(-width // size)) - 1) * size + 1 - width
        if short <= 0:
            return self
        return Anchors(*(F.pad(each, (0, short)) for each in (self.last, self.valid, self.scale)))

    @classmethod
    def sample(
        cls,
        eligible: Tensor,
        most: int,
        generators: Sequence[torch.Generator],
        weights: Tensor | None = None,
    ) -> Anchors:
        """Up to `most` positions of every row where `eligible` [B, T] bool, drawn without
        repetition from each row's own generator and in ascending order. Reads the mask on the host;
        for training only.

        weights [B, T]: the weight of a block with its root at this position (the root of a block
        behind position t is at t + 1); positions are drawn in proportion to it.
        """
        chosen, scales = [], []
        for number, (row, generator) in enumerate(zip(eligible.cpu(), generators, strict=True)):
            places = row.nonzero().squeeze(1)
            roots = (places + 1).clamp(max=row.shape[0] - 1)
            heavy = None if weights is None else weights[number].cpu()[roots]
            order, scale = draw(places.shape[0], most, generator, heavy)
            chosen.append(places[order])
            scales.append(scale)
        width = max(1, *(places.shape[0] for places in chosen))
        last, scale = (
            torch.stack([F.pad(p, (0, width - p.shape[0])) for p in rows])
            for rows in (chosen, scales)
        )
        counts = torch.tensor([p.shape[0] for p in chosen])
        valid = torch.arange(width) < counts[:, None]
        device = eligible.device
        return cls(last.to(device), valid.to(device), scale.to(device))

    @classmethod
    def everywhere(cls, tokens: Tensor) -> Anchors:
        """A block behind every position of `tokens` [B, T]."""
        last = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        scale = torch.ones(tokens.shape, device=tokens.device)
        return cls(last, torch.ones_like(last, dtype=torch.bool), scale)


def draw(
    count: int, most: int, generator: torch.Generator, weights: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Numbers below `count`, at most `most` of them, ascending int64, and the scale [chosen]
    float32 that makes a sum over them an unbiased estimate of the sum over all, each times its
    weight.

    weights [count]: a number is drawn with a chance in proportion to its weight (at most 1), by
    systematic sampling in a random order; None, or all the same: every number with the same chance.
    """
    order = torch.randperm(count, generator=generator)
    if weights is None or count == 0 or bool((weights == weights[0]).all()):
        order = order[:most].sort().values
        factor = 1.0 if weights is None or count == 0 else float(weights[0])
        return order, torch.full(order.shape, factor * (count / max(1, order.shape[0])))
    chances = inclusion(weights.double(), most)
    ends = chances[order].cumsum(0)
    offset = torch.rand((), generator=generator, dtype=torch.float64)
    # A number is chosen if its interval of the sum holds one of the marks offset, offset + 1, ...
    hit = (ends - offset).ceil() > (ends - chances[order] - offset).ceil()
    order = order[hit].sort().values
    return order, (weights[order] / chances[order]).float()


def inclusion(weights: Tensor, most: int) -> Tensor:
    """Chances [count] in proportion to the weights, at most 1, that sum to `most` (or fewer)."""
    chances = torch.zeros_like(weights)
    sure = torch.zeros_like(weights, dtype=torch.bool)
    while True:
        rest = weights.masked_fill(sure, 0.0)
        left = most - int(sure.sum())
        if left <= 0 or float(rest.sum()) == 0.0:
            return torch.where(sure, torch.ones_like(chances), torch.zeros_like(chances))
        chances = torch.where(sure, torch.ones_like(rest), rest * (left / rest.sum()))
        over = chances > 1.0
        if not bool(over.any()):
            return chances
        sure |= over
