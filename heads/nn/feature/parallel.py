"""Rows behind an anchor that stand for tokens not known yet (P-EAGLE), or not trained everywhere
(EAGLE-3's unrolled steps): which of them are trained, and what they see.

The mask rows 1, 2, ... behind an anchor t have positions t+1, t+2, ...; mask row j predicts token
t+2+j. It attends to the true rows up to its anchor and to the mask rows of its own anchor up to
itself. Mask rows behind every position would multiply the work by the depths, so training keeps
fewer anchors at greater depths (COD, conditional drop: a share r^j of them, never less than a
floor; PARD, 2504.18583; P-EAGLE, 2602.01469). An anchor kept at one depth is kept at all shallower
ones, because its mask rows read each other. A step that is unrolled behind an anchor has the
position and the view of the mask row of its number.

Legend: B rows, T positions, K depths, A anchors, M mask rows at one depth, h query heads, g
key/value heads, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from heads.api.batch import TrainBatch
from heads.nn import attention, losses
from heads.nn.anchors import Anchors
from heads.nn.packing import first_places


@dataclass(frozen=True)
class Reach:
    """Which of T true rows are seen behind anchors: from the place `first` to the place `last`, [B,
    A] int64 each. whole: the mask [B, 1, A, T] of all anchors, for all layers and depths, if it is
    small; else None."""

    first: Tensor
    last: Tensor
    length: int
    whole: Tensor | None = None

    @classmethod
    def within(cls, segments: Tensor, last: Tensor) -> Reach:
        """Of anchors at `last` [B, A] in their documents, for segments [B, T]."""
        reach = cls(first_places(segments).gather(1, last), last, segments.shape[1])
        if last.numel() * reach.length > attention.CHUNK_ELEMENTS:
            return reach
        return replace(reach, whole=reach.mask(slice(0, last.shape[1])))

    def mask(self, span: slice) -> Tensor:
        """[B, 1, Q, T] bool: of the anchors in `span`."""
        if self.whole is not None:
            return self.whole[:, :, span]
        places = torch.arange(self.length, device=self.last.device)
        first, last = self.first[:, span, None], self.last[:, span, None]
        return ((places >= first) & (places <= last))[:, None]


@dataclass(frozen=True)
class AnchoredRows:
    """The anchors behind which rows are trained: order [B, A] int64, positions in the row, those
    with deeper mask rows first; sizes: the number of anchors of mask rows 1, 2, ..., descending;
    kept: per depth [B, size] bool, False where a row of the batch has fewer. share [B, A] float:
    how many anchors each one stands for in a sum; None: itself alone."""

    order: Tensor
    sizes: tuple[int, ...]
    kept: tuple[Tensor, ...]
    share: Tensor | None = None

    @classmethod
    def everywhere(cls, batch: TrainBatch, depths: int) -> AnchoredRows:
        """Every position at every depth, as drafting would have it."""
        rows, length = batch.tokens.shape
        order = torch.arange(length, device=batch.tokens.device).expand(rows, -1)
        kept = torch.ones_like(order, dtype=torch.bool)
        return cls(order, (length,) * (depths - 1), (kept,) * (depths - 1))

    @classmethod
    def dropped(cls, batch: TrainBatch, depths: int, keep: float, floor: float) -> AnchoredRows:
        """A random share max(keep^j, floor) of the useful anchors for mask row j.

        An anchor is useful if a token beyond its own prediction is supervised. The numbers are
        rounded up row by row, so that they do not depend on the rest of the batch. Synchronises
        with the device once; for training only.
        """
        device, length = batch.tokens.device, batch.tokens.shape[1]
        useful = useful_anchors(batch, depths)
        drawn = torch.stack([torch.rand(length, generator=each) for each in batch.generators()])
        order = (drawn.to(device) + 2.0 * ~useful).argsort(1)
        counts = useful.sum(1).tolist()
        sizes, kept = [], []
        for row in range(1, depths):
            share = max(keep**row, floor)
            per_row = [math.ceil(share * count) for count in counts]
            sizes.append(max(per_row))
            places = torch.arange(sizes[-1], device=device)
            kept.append(places < torch.tensor(per_row, device=device)[:, None])
        return cls(order[:, : max(sizes, default=0)], tuple(sizes), tuple(kept))

    @classmethod
    def sampled(cls, batch: TrainBatch, depths: int, most: int) -> AnchoredRows:
        """Up to `most` of every row's useful anchors for all depths, drawn without repetition, in
        proportion to the batch's weights of their roots. Synchronises with the device once; for
        training only.
        """
        useful, weights = useful_anchors(batch, depths), batch.anchors
        drawn = Anchors.sample(useful, most, batch.generators(), weights)
        share = drawn.scale
        if weights is not None:  # a share excludes the weight, by which the loss multiplies
            roots = (drawn.last + 1).clamp(max=useful.shape[1] - 1)
            heavy = weights.gather(1, roots)
            share = torch.where(heavy > 0, share / heavy, torch.zeros_like(share))
        deeper = depths - 1
        return cls(drawn.last, (drawn.last.shape[1],) * deeper, (drawn.valid,) * deeper, share)

    def shares(self, batch: TrainBatch) -> Tensor | None:
        """How many predictions each of all outputs stands for, in the order of `places`."""
        if self.share is None:
            return None
        true = self.share.new_ones(batch.tokens.numel())
        return torch.cat([true, *(self.share[:, :size].flatten() for size in self.sizes)])

    def at(self, values: Tensor, row: int) -> Tensor:
        """Values [B, T] of the anchors that mask row `row` (1-based) has -> [B, size]."""
        return values.gather(1, self.order[:, : self.sizes[row - 1]])

    def reach(self, segments: Tensor) -> Reach:
        """The true rows that the anchors' mask rows see, for segments [B, T]."""
        return Reach.within(segments, self.order)

    def places(self, batch: TrainBatch, depths: int) -> tuple[Tensor, Tensor]:
        """(places, wanted) for `sum_by_state`: [K, B*T] int64, where among all outputs the one of
        each depth that predicts from each flat state lies; [B*T, K] bool, which of these exist and
        are supervised.

        All outputs: true rows [B, T], then mask rows depth by depth [B, size], flattened.
        """
        rows, length = batch.tokens.shape
        device, states = batch.tokens.device, rows * length
        first_of_row = torch.arange(rows, device=device)[:, None] * length
        places = [(torch.arange(states, device=device) - 1).clamp(min=0)]
        exists = [torch.ones(states, dtype=torch.bool, device=device)]
        offset = states
        for row, size in enumerate(self.sizes[: depths - 1], start=1):
            ahead = self.order[:, :size] + row + 1
            inside = (ahead < length) & self.kept[row - 1]
            # Places outside are written after the last state and cut off.
            at = torch.where(inside, first_of_row + ahead, states).flatten()
            numbers = offset + torch.arange(rows * size, device=device)
            places.append(numbers.new_zeros(states + 1).scatter_(0, at, numbers)[:states])
            found = torch.zeros(states + 1, dtype=torch.bool, device=device)
            exists.append(found.scatter_(0, at, torch.ones_like(at, dtype=torch.bool))[:states])
            offset += rows * size
        return torch.stack(places), losses.supervised_states(batch, depths) & torch.stack(exists, 1)


def useful_anchors(batch: TrainBatch, depths: int) -> Tensor:
    """[B, T] bool: the positions with a supervised token beyond their own prediction, at most
    `depths` tokens ahead of it."""
    useful = torch.zeros_like(batch.loss_mask)
    for depth in range(2, depths + 1):
        useful |= batch.supervised(depth + 1)
    return useful


def anchored_attention(
    query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], reach: Reach
) -> Tensor:
    """Attention of mask rows at one depth -> [B, M, h * D].

    query [B, M, h, D]; keys[0], values[0] [B, T, g, D]: of the true rows, seen within the `reach`
    of the first M anchors; the others [B, M, g, D]: of the same anchors' mask rows up to this
    depth.
    """
    (batch, rows, heads, size), (key, *own_keys) = query.shape, keys
    length = key.shape[1]
    grouped = query.unflatten(2, (key.shape[2], -1)) * size**-0.5
    own = torch.stack([(grouped * each[:, :, :, None]).sum(-1) for each in own_keys], -1)
    own_values = torch.stack(list(values[1:]), 3)  # [B, M, g, j, D]
    chunk = max(1, attention.CHUNK_ELEMENTS // (batch * heads * length))

    def part(span: slice) -> Tensor:
        own_parts = grouped[:, span], own[:, span], own_values[:, span]
        return attention.chained_rows(*own_parts, key, values[0], reach.mask(span))

    return attention.in_chunks(part, rows, chunk)
