"""Mask tokens of a parallel drafter in training: how deep positions draft, and what masks see.

Mask k behind place t has position t + k. It sees the true tokens of its document up to t, the masks
1..k of its own place and nothing else, exactly as in serving. Conditional drop (COD; PARD,
2504.18583) keeps deeper masks at a smaller share of the positions, max(keep^k, least). The
positions of depth k + 1 are among those of depth k, so that no mask lacks the ones before it.

Legend: B rows, T positions, E mask tokens per row, Q of them, K drafted tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from heads.api.batch import TrainBatch


@dataclass(frozen=True)
class Masks:
    """Mask tokens in addition to the sequences. place [B, E] int64: the last true token they see;
    step [B, E] int64: 1 for the first mask after it, up to `most`; valid [B, E] bool: False for
    fillers. Masks of a place are side by side."""

    place: Tensor
    step: Tensor
    valid: Tensor
    most: int

    @classmethod
    def everywhere(cls, tokens: Tensor, steps: int) -> Masks:
        """`steps` masks behind every place of `tokens` [B, T], place by place."""
        length, device = tokens.shape[1], tokens.device
        place = torch.arange(length, device=device).repeat_interleave(steps)
        place = place.expand(tokens.shape[0], -1)
        step = torch.arange(1, steps + 1, device=device).repeat(length).expand_as(place)
        return cls(place, step, torch.ones_like(place, dtype=torch.bool), steps)

    @classmethod
    def sample(cls, batch: TrainBatch, depth: int, keep: float, least: float) -> Masks:
        """Masks for the tokens 2..depth behind a batch's positions, drawn from its generators.

        A place has no mask at a depth if nothing is supervised at that depth or deeper.
        """
        ahead = batch.supervised_ahead(depth - 1)
        wanted = ahead.unflatten(0, batch.tokens.shape).cpu()  # [B, T, K-1]
        shares = [max(keep**step, least) for step in range(1, depth)]
        drawn = zip(wanted, batch.generators(), strict=True)
        rows = [_sample_row(row, shares, generator) for row, generator in drawn]
        valid = [torch.ones_like(place, dtype=torch.bool) for place, _ in rows]
        parts = *zip(*rows, strict=True), valid
        place, step, kept = (
            pad_sequence(list(part), True).to(batch.tokens.device) for part in parts
        )
        return cls(place, step, kept, depth - 1)

    def supervised(self, batch: TrainBatch) -> Tensor:
        """[B, E] bool: whether a mask predicts a supervised token, at place + step + 1."""
        ahead = self.place + self.step + 1
        inside = ahead < batch.tokens.shape[1]
        ahead = ahead.clamp(max=batch.tokens.shape[1] - 1)
        same = batch.segments.gather(1, ahead) == batch.segments.gather(1, self.place)
        return self.valid & inside & same & batch.loss_mask.gather(1, ahead)

    def seen_from(self, span: slice) -> int:
        """The first mask that the masks in `span` may see; the last one is the last in `span`."""
        return max(0, span.start - self.most + 1)

    def visible(self, segments: Tensor, span: slice) -> Tensor:
        """[B, 1, Q, T + n] bool: which places of the sequence and which of the n masks from
        `seen_from` on the masks in `span` see; segments [B, T]."""
        places = torch.arange(segments.shape[1], device=segments.device)
        place, step = self.place[:, span], self.step[:, span]
        near = slice(self.seen_from(span), span.stop)
        same = segments.gather(1, place)[..., None] == segments[:, None]  # [B, Q, T]
        context = same & (places <= place[..., None])
        owner = torch.where(self.valid, self.place, -1)  # fillers are seen by fillers alone
        own = owner[:, span, None] == owner[:, None, near]
        own &= self.step[:, None, near] <= step[..., None]
        return torch.cat([context, own], -1)[:, None]


def _sample_row(
    wanted: Tensor, shares: Sequence[float], generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """(place [e], step [e]) of one row: wanted [T, K-1] bool, which steps are supervised."""
    length, steps = wanted.shape
    lottery = torch.rand(length, generator=generator)
    places = wanted.any(1).nonzero().squeeze(1)
    rank = lottery[places].argsort().argsort()
    counts = (torch.tensor(shares, dtype=torch.float64) * places.shape[0]).ceil()
    kept = rank[:, None] < counts  # [n, K-1]: nested, because shares do not rise
    numbers = torch.arange(1, steps + 1)
    depth = (wanted[places] & kept).mul(numbers).amax(1) if places.numel() else places
    place = places.repeat_interleave(depth)
    first = depth.cumsum(0) - depth
    return place, torch.arange(place.shape[0]) - first.repeat_interleave(depth) + 1
