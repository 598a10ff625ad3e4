"""Packed rows: the places of their documents, and which places share an attention call.

Causal attention that stays within documents needs no mask over a row. A document gets its own call,
which is plain causal attention; short neighbours share a call, with a mask of their own size. So
memory grows with a row's length, not with its square, and most pairs of places in different
documents are not computed at all.

Legend: B rows, T positions, R rows and n places of a stretch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from heads.api.batch import TrainBatch

TOGETHER, TOGETHER_ON_CUDA = 128, 512
"""Most places of neighbouring documents that share an attention call, under a mask. They then share
the call's overhead besides its scores, such as kernel launches on a GPU."""


@dataclass(frozen=True)
class Document:
    """Places [first, end) of a packed row; begin: the position of the first one."""

    row: int
    first: int
    end: int
    begin: int


def documents(segments: Tensor, positions: Tensor) -> tuple[Document, ...]:
    """The documents of packed rows, which cover all places in order; padding is one of them.
    segments [B, T]: equal numbers side by side; positions [B, T]. Synchronises with the device
    once."""
    # [B, T] each, on the host
    numbers, begins = torch.stack([segments.long(), positions.expand(segments.shape)]).cpu()
    starts = torch.ones_like(numbers, dtype=torch.bool)
    starts[:, 1:] = numbers[:, 1:] != numbers[:, :-1]
    places, found = starts.nonzero().tolist(), []
    for number, ((row, first), begin) in enumerate(
        zip(places, begins[starts].tolist(), strict=True)
    ):
        last = number + 1 == len(places) or places[number + 1][0] != row
        end = segments.shape[1] if last else places[number + 1][1]
        found.append(Document(row, first, end, begin))
    return tuple(found)


def first_places(segments: Tensor) -> Tensor:
    """[B, T] int64: where in its row the document of every place begins. No synchronisation."""
    places = torch.arange(segments.shape[1], device=segments.device).expand(segments.shape)
    starts = torch.zeros_like(places)
    starts[:, 1:] = places[:, 1:] * (segments[:, 1:] != segments[:, :-1])
    return starts.cummax(1).values


def within_documents(segments: Tensor) -> Tensor:
    """[R, 1, n, n] bool: causal within equal segment numbers [R, n]. Padding attends to padding, so
    that no row is empty."""
    length = segments.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=segments.device).tril()
    return ((segments[:, :, None] == segments[:, None, :]) & causal)[:, None]


@dataclass(frozen=True)
class Stretch:
    """R times n places, side by side in the flat batch, that share an attention call: `rows`
    sequences of `length` places. mask [R, 1, n, n] bool; None: plain causal."""

    rows: int
    length: int
    mask: Tensor | None = None


class Packing:
    """The attention calls of a batch: stretches that cover the flat batch [B * T] in order.

    Rows of one document each are one stretch without a mask, and rows no longer than `TOGETHER`
    are one with a mask. whole: that single stretch, None if there are more. This is no dataclass,
    because the compiler would make a program for every number of stretches.
    """

    def __init__(self, stretches: Sequence[Stretch]) -> None:
        self.stretches = tuple(stretches)
        self.whole = self.stretches[0] if len(self.stretches) == 1 else None

    @classmethod
    def of(cls, batch: TrainBatch) -> Packing:
        """The packing of a batch's rows. Synchronises with the device once; for training only."""
        segments, (rows, length) = batch.segments, batch.segments.shape
        lying = documents(segments, batch.positions)
        if len(lying) == rows:
            return cls([Stretch(rows, length)])
        most = TOGETHER_ON_CUDA if segments.is_cuda else TOGETHER
        if length <= most:
            return cls([Stretch(rows, length, within_documents(segments))])
        stretches = []
        for several in _neighbours(lying, most):
            row, first, end = several[0].row, several[0].first, several[-1].end
            own = segments[row : row + 1, first:end]
            mask = within_documents(own) if len(several) > 1 else None
            stretches.append(Stretch(1, end - first, mask))
        return cls(stretches)


def _neighbours(lying: Sequence[Document], most: int) -> list[list[Document]]:
    """Documents in order; those of a row are grouped while they have `most` places or fewer."""
    found: list[list[Document]] = []
    for one in lying:
        last = found[-1] if found else []
        if last and last[0].row == one.row and one.end - last[0].first <= most:
            last.append(one)
        else:
            found.append([one])
    return found
