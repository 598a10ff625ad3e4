"""The target's key/value cache: preallocated, slot-addressed, compacted after every verification.

Row b's committed tokens occupy slots 0 .. length[b]-1, slot = position. A verification writes node i to slot length[b] + i; commit
moves the accepted nodes' entries down so that they become contiguous again. Buffers are full length for every layer, sliding
windows included: windows are a matter of the mask, because a tree must be able to roll back.

Legend: B rows, R rows being prefilled, N nodes, S slots, h key/value heads, D head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class SlotWriter:
    """Where the running forward pass writes, shared by all layers of one cache.

    mode "prefill": fresh tokens at slots 0..T-1 of `rows` [R]; layers attend to the fresh keys only.
    mode "verify": nodes at `start` .. start+N (one row, host-known) or at `slots` [B, N]; layers attend to slots < `bound`.
    """

    def __init__(self) -> None:
        self.mode = "prefill"
        self.rows: Tensor | None = None
        self.slots: Tensor | None = None
        self.row_index: Tensor | None = None
        self.start: int | None = None
        self.bound = 0


class SlotLayer(CacheLayerMixin):
    """One layer's keys and values [B, h, S, D], allocated when the first keys show their shape."""

    is_sliding = False
    is_compileable = True

    def __init__(self, rows: int, capacity: int, writer: SlotWriter) -> None:
        super().__init__()
        self.rows, self.capacity, self.writer = rows, capacity, writer

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        def buffer(like: Tensor) -> Tensor:
            # zeros, not empty: masked entries get weight 0, and 0 * NaN would still be NaN
            return like.new_zeros(self.rows, like.shape[1], self.capacity, like.shape[3])

        self.keys, self.values = buffer(key_states), buffer(value_states)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store the new keys and values ([R|B, h, T|N, D]) and return those that the layer attends to."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        writer = self.writer
        if writer.mode == "prefill":
            assert writer.rows is not None
            self.keys[writer.rows, :, : key_states.shape[2]] = key_states
            self.values[writer.rows, :, : value_states.shape[2]] = value_states
            return key_states, value_states
        if writer.start is not None:
            stop = writer.start + key_states.shape[2]
            self.keys[:, :, writer.start : stop] = key_states
            self.values[:, :, writer.start : stop] = value_states
        else:
            self.keys[writer.row_index, :, writer.slots] = key_states.transpose(1, 2)
            self.values[writer.row_index, :, writer.slots] = value_states.transpose(1, 2)
        return self.keys[:, :, : writer.bound], self.values[:, :, : writer.bound]

    def get_mask_sizes(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        return self.capacity, 0

    def get_seq_length(self, *args: Any, **kwargs: Any) -> int:
        return 0

    def get_max_length(self) -> int:
        return self.capacity

    def get_max_cache_shape(self) -> int:
        return self.capacity

    def reset(self) -> None:
        """Nothing to do: entries beyond a row's length are never read."""


class KVCache(Cache):
    """Slot-addressed cache for `rows` sequences of at most `capacity` slots (tree nodes included)."""

    def __init__(self, num_layers: int, rows: int, capacity: int) -> None:
        self.writer = SlotWriter()
        self.rows, self.capacity = rows, capacity
        super().__init__(layers=[SlotLayer(rows, capacity, self.writer) for _ in range(num_layers)])

    def bytes(self) -> int:
        """Bytes held by all buffers."""
        total = 0
        for layer in self.layers:
            if layer.is_initialized:
                total += sum(t.numel() * t.element_size() for t in (layer.keys, layer.values))
        return total

    def compact(self, lengths: Tensor, path: Tensor) -> None:
        """Move the accepted nodes down: slot lengths+path[d] -> slot lengths+d, for every layer.

        lengths [B] int64 before the verification, path [B, D+1] int64 node numbers, ascending along the path. Gathers before it
        writes, so overlapping moves are safe; entries beyond a row's accepted path move garbage behind the new length.
        """
        rows = torch.arange(path.shape[0], device=path.device)[:, None]
        source = lengths[:, None] + path
        target = lengths[:, None] + torch.arange(path.shape[1], device=path.device)
        for layer in self.layers:
            if layer.is_initialized:
                layer.keys[rows, :, target] = layer.keys[rows, :, source]
                layer.values[rows, :, target] = layer.values[rows, :, source]
