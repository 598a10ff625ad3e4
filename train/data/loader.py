"""The rows that each optimiser step reads: a pure function of its index, for any number of
processes.

Rows form one endless stream: epoch 0 in its own random order, then epoch 1 in another, and so on.
Step k reads rows k * global_batch ... (k + 1) * global_batch - 1 of it, so an epoch's incomplete
last step is filled from the next epoch and no row is lost. Resuming needs only the index.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from heads.api.errors import UserError
from train.data.pack import PackedData
from train.data.permute import stable_permutation


@dataclass(frozen=True)
class PackedBatch:
    """Rows of one micro-batch on the CPU, b rows of T positions: what `TrainBatch` needs, without
    the target's features.

    tokens [b, T] int64; positions [b, T] int64; segments [b, T] int32 (0 on padding); loss_mask [b,
    T] bool; seeds [b] int64: of the random numbers of a loss for each row (`TrainBatch.seeds`);
    weights and anchors [b, T] float32 or None (`TrainBatch.weights`).
    """

    tokens: Tensor
    positions: Tensor
    segments: Tensor
    loss_mask: Tensor
    seeds: Tensor
    weights: Tensor | None = None
    anchors: Tensor | None = None

    @classmethod
    def unsupervised(cls, tokens: Tensor, positions: Tensor, segments: Tensor) -> PackedBatch:
        """Rows for the target alone: no mask, seeds of 0."""
        mask, seeds = torch.zeros_like(tokens, dtype=torch.bool), torch.zeros(len(tokens)).long()
        return cls(tokens.long(), positions.long(), segments, mask, seeds)

    def tensors(self) -> dict[str, Tensor]:
        return {name: value for name, value in vars(self).items() if value is not None}

    def rows(self, count: int) -> PackedBatch:
        return PackedBatch(**{name: value[:count] for name, value in self.tensors().items()})

    def to(self, device: torch.device | str) -> PackedBatch:
        return PackedBatch(**{name: value.to(device) for name, value in self.tensors().items()})


def require_dealt(global_batch: int, micro_batch: int, processes: int) -> None:
    """Raise `UserError` unless every process gets the same number of whole micro-batches."""
    each = micro_batch * processes
    if micro_batch >= 1 and global_batch >= 1 and not global_batch % each:
        return
    fitting = max(1, -(-global_batch // max(1, each))) * max(1, each)
    smaller = (size for size in range(micro_batch, 0, -1) if not global_batch % (size * processes))
    micro = next(smaller, 0) if global_batch > 0 else 0
    raise UserError(
        f"train.global_batch={global_batch} cannot be dealt to {processes} processes in "
        f"micro-batches of {micro_batch} (train.micro_batch): it must be a positive multiple of "
        f"{each}. Set train.global_batch={fitting}"
        f"{f' or train.micro_batch={micro}' if micro else ''}."
    )


class StepLoader:
    """Deals the rows of every global step to processes and micro-batches. global_batch: rows per
    step of all processes, a multiple of micro_batch (rows per forward pass) x world_size, else
    `UserError`. `wait_seconds` is the total time that `iterate` has waited."""

    def __init__(
        self,
        data: PackedData,
        global_batch: int,
        micro_batch: int,
        world_size: int,
        rank: int,
        seed: int,
    ) -> None:
        assert 0 <= rank < world_size, f"rank {rank} of {world_size}"
        require_dealt(global_batch, micro_batch, world_size)
        self.data, self.seed, self.wait_seconds = data, seed, 0.0
        self.global_batch, self.micro_batch = global_batch, micro_batch
        self.world_size, self.rank = world_size, rank
        self._orders: dict[int, NDArray[np.int64]] = {}

    @property
    def steps_per_epoch(self) -> int:
        """Steps until every row was read at least once."""
        return -(-len(self.data) // self.global_batch)

    def step(self, index: int) -> list[PackedBatch]:
        """This process's micro-batches of global step `index` (from 0); the rows' seeds follow only
        from the step and the place in it."""
        sequence = np.random.SeedSequence([self.seed, index])
        seeds = sequence.generate_state(self.global_batch).astype(np.int64)
        shape = (-1, self.world_size, self.micro_batch)
        own = zip(self.rows(index).reshape(shape), seeds.reshape(shape), strict=True)
        return [
            packed_rows(self.data, rows[self.rank], torch.from_numpy(seed[self.rank]))
            for rows, seed in own
        ]

    def supervised(self, index: int) -> int:
        """Supervised tokens of the whole global step, all processes together."""
        return int(self.data.supervised[self.rows(index)].sum())

    def rows(self, index: int) -> NDArray[np.int64]:
        """Row numbers [global_batch] of global step `index`, for all processes."""
        assert index >= 0, f"step {index}"
        places = np.arange(index * self.global_batch, (index + 1) * self.global_batch)
        epochs, within = np.divmod(places, len(self.data))
        orders = [self._order(epoch) for epoch in epochs.tolist()]
        return np.array([o[place] for o, place in zip(orders, within, strict=True)], dtype=np.int64)

    def iterate(self, start: int, stop: int) -> Iterator[tuple[int, list[PackedBatch]]]:
        """(index, micro-batches) of steps start ... stop - 1, each built while another is used."""
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="loader") as pool:
            ahead = pool.submit(self.step, start) if start < stop else None
            for index in range(start, stop):
                assert ahead is not None
                begun = time.perf_counter()
                batches = ahead.result()
                self.wait_seconds += time.perf_counter() - begun
                ahead = pool.submit(self.step, index + 1) if index + 1 < stop else None
                yield index, batches

    def _order(self, epoch: int) -> NDArray[np.int64]:
        """The epoch's permutation of rows; two are kept, since a step may span two epochs."""
        order = self._orders.get(epoch)
        if order is None:
            order = stable_permutation(len(self.data), self.seed, epoch)
            self._orders[epoch] = order
            for old in [kept for kept in list(self._orders) if abs(kept - epoch) > 1]:
                self._orders.pop(old, None)
        return order


def packed_rows(data: PackedData, rows: NDArray[np.int64], seeds: Tensor) -> PackedBatch:
    """These rows of the packed answers as one batch."""
    arrays = [vars(data.row(int(row))) for row in rows]
    parts = {
        name: torch.from_numpy(np.stack([row[name] for row in arrays]))
        for name, value in arrays[0].items()
        if value is not None
    }
    tokens, positions = parts.pop("tokens").long(), parts.pop("positions").long()
    return PackedBatch(tokens, positions, seeds=seeds, **parts)
