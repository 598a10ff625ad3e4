"""The states of recurrent layers: the committed states of a cache, and what a verification would
add to them.

A verification changes no state. It stores the inputs of its nodes, and `commit` adds those of the
accepted path to the states. So rejected drafts never enter a state, and there is one state per row,
not per node. There are three kinds of states.

* WINDOW [C, M]: the last M inputs of a convolution.
* RANK_ONE [h, k, v]: a matrix S per head to which every token adds one of rank one. With g_j <= 0
  the log decay of node j and G_i its sum along the path from the root to node i, the state after
  node i is

      S_i = e^{G_i} S + sum over the path's nodes j of e^{G_i - G_j} a_j b_j^T

  (gated delta rule, 2412.06464; with a decay per key channel, Kimi delta attention, 2510.26692;
  Mamba-2, 2405.21060). All exponents are <= 0.
* BY_NODE [C, s]: few enough numbers that a verification keeps the state after every node (Mamba-1,
  2312.00752).

As with keys (`inference.target.kv_cache`), the shapes are known only from the first pass, and
states of one shape share one buffer, so that a commit is one operation for all of them.

Legend: L layers of a buffer, B rows, N nodes, D the tree's deepest level, C channels, M entries of
a window, h heads, k and v key and value size, s state size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from heads.api.tree import TokenTree

Key = tuple[int, str, int]
"""Mixer, kind, number of the call within a pass."""


class Kind(StrEnum):
    """See the module."""

    WINDOW = "window"
    RANK_ONE = "rank one"
    BY_NODE = "by node"


@dataclass(frozen=True)
class StateShape:
    """One state of a row: its kind, its sizes without the row, dtype and device. For RANK_ONE:
    left_heads: heads of the vectors a, if several heads of the state share one (0: as many as the
    state); decay_size: numbers of a decay."""

    kind: Kind
    sizes: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    left_heads: int = 0
    decay_size: int = 1

    @property
    def bytes(self) -> int:
        """Bytes of one row."""
        return torch.Size(self.sizes).numel() * self.dtype.itemsize

    @property
    def node_bytes(self) -> int:
        """Bytes that a verification keeps per node of a row."""
        if self.kind == Kind.BY_NODE:
            return self.bytes
        if self.kind == Kind.WINDOW:
            return self.sizes[0] * self.dtype.itemsize
        heads, key_size, value_size = self.sizes
        numbers = heads * (self.decay_size + value_size) + (self.left_heads or heads) * key_size
        return numbers * self.dtype.itemsize


@dataclass
class _Group:
    """States [L, B, ...] of one shape, and their keys."""

    shape: StateShape
    states: Tensor
    keys: list[Key]


class RecurrentStates:
    """All states of one cache of B rows.

    expected: `shapes()` of an earlier cache of the same model; empty if there was none.
    """

    def __init__(self, rows: int, expected: Mapping[Key, StateShape] | None = None) -> None:
        self.rows, self._expected = rows, dict(expected or {})
        self._groups: list[_Group] = []
        self._places: dict[Key, tuple[_Group, int]] = {}
        self._added: dict[Key, tuple[Tensor, ...]] = {}

    def state(self, key: Key, shape: StateShape) -> Tensor:
        """The committed state [B, ...] of a key; zeros on first access."""
        if key not in self._places:
            self._place(key, shape)
        group, place = self._places[key]
        return group.states[place]

    def _place(self, key: Key, shape: StateShape) -> None:
        if self._expected.get(key) == shape:
            keys = [known for known, other in self._expected.items() if other == shape]
        else:
            keys = [key]
        zeros = torch.zeros(
            len(keys), self.rows, *shape.sizes, dtype=shape.dtype, device=shape.device
        )
        group = _Group(shape, zeros, keys)
        self._groups.append(group)
        self._places |= {known: (group, place) for place, known in enumerate(keys)}

    def shapes(self) -> dict[Key, StateShape]:
        """The shapes of all states, for the next cache."""
        return {key: group.shape for key, (group, _) in self._places.items()}

    def add(self, key: Key, *inputs: Tensor) -> None:
        """Store what a verification would add to a state.

        WINDOW: the committed window followed by the nodes' inputs [B, C, M+N]. RANK_ONE: decays G
        [B, h, N, k|1], a [B, g, N, k] for g heads, each shared by h / g heads of the state, b
        [B, h, N, v]. BY_NODE: states [B, N, C, s].
        """
        self._added[key] = inputs

    def commit(self, tree: TokenTree, path: Tensor, count: Tensor) -> None:
        """Add the first count [B] nodes of path [B, D+1] of the last verification; rows that commit
        none do not change."""
        last = path.gather(1, (count - 1).clamp(min=0)[:, None])[:, 0]
        end = _End.of(tree, last)
        for group in self._groups:
            added = (self._added[key] for key in group.keys)
            inputs = [torch.stack(parts) for parts in zip(*added, strict=True)]
            after = _AFTER[group.shape.kind](group.states, end, *inputs)
            moves = (count > 0).view(1, -1, *[1] * len(group.shape.sizes))
            group.states.copy_(torch.where(moves, after, group.states))
        self._added.clear()

    def first_rows(self, count: int) -> RecurrentStates:
        """The first `count` rows, in the same buffers."""
        part = RecurrentStates(count, self._expected)
        for group in self._groups:
            own = _Group(group.shape, group.states[:, :count], group.keys)
            part._groups.append(own)
            part._places |= {key: (own, place) for place, key in enumerate(group.keys)}
        return part

    def move_row(self, source: int, target: int) -> None:
        """Copy one row's states over another row's."""
        for group in self._groups:
            group.states[:, target] = group.states[:, source]

    def bytes(self) -> int:
        """Bytes held by all buffers."""
        return sum(group.states.nbytes for group in self._groups)

    def added_bytes(self) -> int:
        """Bytes held until the last verification is committed."""
        return sum(tensor.nbytes for inputs in self._added.values() for tensor in inputs)


@dataclass
class _End:
    """The end of each row's accepted path: node [B] int64; path [B, N] bool: the nodes on it."""

    node: Tensor
    path: Tensor
    tree: TokenTree

    @classmethod
    def of(cls, tree: TokenTree, node: Tensor) -> _End:
        row = torch.arange(node.shape[0], device=node.device)
        ancestors = tree.ancestors.expand(node.shape[0], -1, -1)
        return cls(node, ancestors[row, node], tree)

    def pick(self, values: Tensor, dim: int) -> Tensor:
        """The end's entry of values [L, B, ...], with the nodes along `dim`, which is removed."""
        shape = [1] * values.dim()
        shape[1] = -1
        sizes = list(values.shape)
        sizes[dim] = 1
        return values.gather(dim, self.node.view(shape).expand(sizes)).squeeze(dim)


def _window_after(states: Tensor, end: _End, inputs: Tensor) -> Tensor:
    """Inputs [L, B, C, M+N] -> windows [L, B, C, M] that end with the path's last input."""
    back = inputs_along_paths(end.tree, states.shape[-1] + 1)[:, :, 1:]
    row = torch.arange(end.node.shape[0], device=end.node.device)
    wanted = back.expand(len(row), -1, -1)[row, end.node]
    return inputs.gather(3, wanted[None, :, None].expand(*states.shape))


def _rank_one_after(
    states: Tensor, end: _End, decay: Tensor, left: Tensor, right: Tensor
) -> Tensor:
    """The sum in the module's docstring, for the path's last node: [L, B, h, k, v]."""
    total = end.pick(decay, 3)
    share = total[:, :, :, None] - decay
    share = share.masked_fill(~end.path[None, :, None, :, None], float("-inf")).exp()
    kept = states * total.exp()[..., None]
    if decay.shape[-1] > 1:  # one per key channel
        return kept + (left * share).transpose(-1, -2) @ right
    heads = left.shape[2]
    shared = (right * share).unflatten(2, (heads, -1))  # [L, B, g, h / g, N, v]
    return kept + (left.transpose(-1, -2)[:, :, :, None] @ shared).flatten(2, 3)


def _node_state(states: Tensor, end: _End, nodes: Tensor) -> Tensor:
    """Nodes' states [L, B, N, C, s] -> [L, B, C, s]."""
    return end.pick(nodes, 2)


_AFTER: dict[Kind, Callable[..., Tensor]] = {
    Kind.WINDOW: _window_after,
    Kind.RANK_ONE: _rank_one_after,
    Kind.BY_NODE: _node_state,
}


def inputs_along_paths(tree: TokenTree, width: int) -> Tensor:
    """The places of the inputs of a convolution of width K for each node, [1|B, N, K] int64. The
    node itself is last; before it are the inputs 1 .. K-1 steps back along its path. Places count
    the row's last K-1 committed inputs, followed by the nodes' inputs."""
    device, root = tree.parents.device, width - 1
    nodes = torch.arange(tree.num_nodes, device=device)
    if tree.is_chain:
        return (nodes[:, None] + torch.arange(width, device=device))[None]
    place = (root + nodes).expand_as(tree.parents)
    found = [place]
    for _ in range(width - 1):
        above = root + tree.parents.gather(1, (place - root).clamp(min=0))
        # before the root are the committed inputs, the latest first
        place = torch.where(place > root, above, place - 1)
        found.insert(0, place)
    return torch.stack(found, -1)
