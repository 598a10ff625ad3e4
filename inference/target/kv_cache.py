"""The target's key/value cache: preallocated, slot-addressed, compacted after every verification.

Row b's committed tokens occupy slots 0 .. length[b]-1, slot = position. A verification writes node
i to slot length[b] + i; a commit moves the accepted nodes' entries down, so that they are
contiguous again. Buffers have full length for every layer, sliding windows included: the mask
applies windows, because a tree must be able to roll back.

Layers of equal shape share one storage, so that compaction is one operation for all of them. The
shapes are known only from the layers' first keys: the config does not show what tensor parallelism
leaves to this rank, and some layers have heads of a different size (Gemma 4) or no keys (shared
ones). So the first cache of a model gives each layer a separate storage and learns the shapes
(`KVCache.shapes`; the self-check at loading is such a run). Caches that are given the shapes
allocate one storage per group of equal layers. In both cases exactly the bytes that are used are
allocated, and all caches behave the same.

Legend: L layers of a storage, B rows, R rows being prefilled, T fresh tokens, N nodes, S slots, h
key/value heads, C and E numbers per key and value, D the tree's deepest level.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from heads.api.tree import TokenTree
from inference.kernels.reference.commit import COMPACT, WRITE_SLOTS


@dataclass(frozen=True)
class LayerShape:
    """What a layer stores per slot: `heads` keys of `key_size`, values of `value_size`."""

    heads: int
    key_size: int
    value_size: int
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes(self) -> int:
        """Bytes of one slot."""
        return self.heads * (self.key_size + self.value_size) * self.dtype.itemsize

    @classmethod
    def of(cls, keys: Tensor, values: Tensor) -> LayerShape:
        """The shape of new keys [R, h, T, C] and values [R, h, T, E]."""
        return cls(keys.shape[1], keys.shape[3], values.shape[3], keys.dtype, keys.device)


@dataclass(frozen=True)
class CacheSizes:
    """Bytes of a target's cache: per slot of a row (keys and values), per row (recurrent states),
    and per node of a row during a verification (inputs to the recurrent states)."""

    slot: int
    row: int
    node: int


@dataclass
class Storage:
    """Keys [L, B, h, S, C] and values [L, B, h, S, E] of L layers of equal shape."""

    keys: Tensor
    values: Tensor

    @classmethod
    def empty(cls, shape: LayerShape, layers: int, rows: int, capacity: int) -> Storage:
        def buffer(size: int) -> Tensor:
            # zeros, not empty: masked entries get weight 0, and 0 * NaN would still be NaN
            return torch.zeros(
                layers, rows, shape.heads, capacity, size, dtype=shape.dtype, device=shape.device
            )

        return cls(buffer(shape.key_size), buffer(shape.value_size))

    def bytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes


class Storages:
    """All buffers of one cache; gives each layer its keys and values. It has no reference to the
    layers, so that dropping a cache frees its memory at once.

    expected: the shape of each layer, None if unknown.
    """

    def __init__(self, rows: int, capacity: int, expected: Sequence[LayerShape | None]) -> None:
        self.rows, self.capacity, self.expected = rows, capacity, list(expected)
        self.all: list[Storage] = []
        self._shared: dict[LayerShape, Storage] = {}

    def place(self, number: int, shape: LayerShape) -> tuple[Tensor, Tensor]:
        """Views [B, h, S, C], [B, h, S, E] for layer `number`, whose first keys have `shape`."""
        if self.expected[number] != shape:
            storage, position = self._new(shape, 1), 0
        else:
            if shape not in self._shared:
                self._shared[shape] = self._new(shape, self.expected.count(shape))
            storage, position = self._shared[shape], self.expected[:number].count(shape)
        return storage.keys[position], storage.values[position]

    def _new(self, shape: LayerShape, layers: int) -> Storage:
        storage = Storage.empty(shape, layers, self.rows, self.capacity)
        self.all.append(storage)
        return storage


@dataclass
class SlotWriter:
    """The slots that the running forward pass writes, shared by all layers of one cache.

    mode "prefill": new tokens at slots offset .. offset+T-1 of `rows` [R], where the host knows
    `offset`; layers attend to slots < offset+T of those rows (for offset 0: to the new keys
    themselves). mode "verify": nodes at slots from `start` on (one row, known to the host) or, if
    `start` is None, at `slots` [B, N], known only to the device; layers attend to slots < `bound`.
    compiled: verifications run through compiled layers, if the target has them
    (inference/decoding/execution/layers.py).
    """

    mode: str = "prefill"
    rows: Tensor | None = None
    offset: int = 0
    slots: Tensor | None = None
    start: int | None = None
    bound: int = 0
    compiled: bool = False


class SlotLayer(CacheLayerMixin):
    """Layer `number`'s keys [B, h, S, C] and values [B, h, S, E]: views of a storage."""

    is_sliding = False
    is_compileable = True

    def __init__(self, number: int, storages: Storages, writer: SlotWriter) -> None:
        super().__init__()
        self.number, self.storages, self.writer = number, storages, writer
        self.capacity = storages.capacity
        self.shape: LayerShape | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.shape = LayerShape.of(key_states, value_states)
        self.keys, self.values = self.storages.place(self.number, self.shape)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store new keys and values ([R|B, h, T|N, C], [.., E]); returns those to attend to."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        writer = self.writer
        if writer.mode == "prefill":
            return self._prefill(key_states, value_states)
        if writer.start is not None:
            stop = writer.start + key_states.shape[2]
            self.keys[:, :, writer.start : stop] = key_states
            self.values[:, :, writer.start : stop] = value_states
        else:
            assert writer.slots is not None
            WRITE_SLOTS(self.keys, self.values, key_states, value_states, writer.slots)
        return self.keys[:, :, : writer.bound], self.values[:, :, : writer.bound]

    def _prefill(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        rows, first = self.writer.rows, self.writer.offset
        assert rows is not None
        stop = first + key_states.shape[2]
        self.keys[rows, :, first:stop] = key_states
        self.values[rows, :, first:stop] = value_states
        if first == 0:
            return key_states, value_states
        return self.keys[rows, :, :stop], self.values[rows, :, :stop]

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
    """Slot-addressed cache for `rows` sequences of at most `capacity` slots (tree nodes included).

    shapes: the result of `shapes()` of an earlier cache of the same model, or None if there was
    none; see the module. A layer whose first keys differ from the expected shape gets a separate
    storage.
    """

    def __init__(
        self,
        num_layers: int,
        rows: int,
        capacity: int,
        shapes: Sequence[LayerShape | None] | None = None,
    ) -> None:
        assert shapes is None or len(shapes) == num_layers, "one shape per layer"
        self.writer = SlotWriter()
        self.rows, self.capacity = rows, capacity
        self.storages = storages = Storages(rows, capacity, shapes or [None] * num_layers)
        super().__init__(layers=[SlotLayer(i, storages, self.writer) for i in range(num_layers)])

    def shapes(self) -> tuple[LayerShape | None, ...]:
        """The shape of each layer, for the next cache; None for layers without keys so far."""
        return tuple(layer.shape for layer in self.layers)

    def bytes(self) -> int:
        """Bytes held by all buffers."""
        return sum(storage.bytes() for storage in self.storages.all)

    def first_rows(self, count: int) -> KVCache:
        """The first `count` rows as a cache in this one's buffers, once layers have keys."""
        part = KVCache(len(self.layers), count, self.capacity)
        self._share_rows(part)
        return part

    def _share_rows(self, part: KVCache) -> None:
        """Let `part`, a new cache of fewer rows, use this one's keys and values."""
        count = part.rows
        part.storages.all = [
            Storage(whole.keys[:, :count], whole.values[:, :count]) for whole in self.storages.all
        ]
        for layer, whole in zip(part.layers, self.layers, strict=True):
            layer.shape = whole.shape
            if whole.is_initialized:
                layer.keys, layer.values = whole.keys[:count], whole.values[:count]
                layer.is_initialized = True

    def move_row(self, source: int, target: int) -> None:
        """Copy one row's keys and values over another row's."""
        for storage in self.storages.all:
            storage.keys[:, target] = storage.keys[:, source]
            storage.values[:, target] = storage.values[:, source]

    def commit(
        self, tree: TokenTree, lengths: Tensor, path: Tensor, accepted: Tensor, committed: Tensor
    ) -> None:
        """Keep the first `committed` [B] nodes of `path` [B, D+1] of the last verification.

        lengths [B]: before it; accepted [B]: entries of the path after the root that are moved, at
        least `committed` - 1; all int64. Rows that commit nothing do not change.
        """
        if not tree.is_chain:
            self.compact(lengths, path, accepted)

    def compact(self, lengths: Tensor, path: Tensor, accepted: Tensor | None = None) -> None:
        """Move the accepted nodes down: slot lengths+path[d] -> slot lengths+d in every layer.

        lengths [B] int64 before the verification, path [B, D+1] int64 node numbers, root first.
        accepted [B] int64: entries of the path beyond it are not moved; None: all are moved, those
        beyond a row's path as garbage after its new length. Overlapping moves are safe.
        """
        for storage in self.storages.all:
            COMPACT(storage.keys, storage.values, lengths, path, accepted)
