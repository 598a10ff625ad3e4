"""A matrix product in which a row's result depends neither on the other rows, nor on their number,
nor on its place among them, in plain torch. `row_linear.py` has the Triton kernel.

A library chooses the tiles of a product by the number of rows, and with them the order of its sums:
in bfloat16 a pass over six tokens rounds differently from six passes over one. Here the library
gets `TILE` rows in every call, with zeros to fill the last call. If the result of a row still
depends on its place, the library gets one row per call.

Legend: M rows, K inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from heads.kernels.dispatch import FLOATS, Op

TILE = 8
"""Rows of a product on a CPU, where unneeded rows cost time: a chain of seven drafts and its
root."""


class InTiles:
    """A function of rows [M, ...] -> [M, ...], always called with the same number of rows, `most`.

    The first call tests whether a row's result depends on its place in a tile, with random rows and
    the same rows in another order. If it does, the function gets one row per call.
    """

    def __init__(self, call: Callable[[Tensor], Tensor], most: int = TILE) -> None:
        self.call, self.most = call, most
        self.tile = 0

    def __call__(self, rows: Tensor) -> Tensor:
        """The results of all rows, in their order."""
        if not self.tile:
            self.tile = self.most if self._alike(rows) else 1
        count, missing = rows.shape[0], -rows.shape[0] % self.tile
        if missing:
            rows = torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])])
        parts = [self.call(part) for part in rows.split(self.tile)]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts)
        return whole[:count]

    def _alike(self, like: Tensor) -> bool:
        generator = torch.Generator().manual_seed(0)
        rows = torch.randn(self.most, *like.shape[1:], generator=generator).to(like)
        found = self.call(rows)
        turned = all(torch.equal(self.call(rows.roll(n, 0)), found.roll(n, 0)) for n in (1, 3))
        return turned and torch.equal(
            self.call(torch.zeros_like(rows) + rows[:1]), found[:1].expand_as(found)
        )


def row_linear(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """rows [M, K], weight [O, K], bias [O], all of one dtype -> [M, O] in that dtype, with sums in
    float32 (float64 for float64)."""
    return InTiles(lambda part: F.linear(part, weight, bias))(rows)


ROW_LINEAR = Op("row_linear", row_linear, "inference.kernels.row_linear:row_linear", FLOATS)
