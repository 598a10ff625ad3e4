"""The kind of the running forward pass, for layers that carry a state along the sequence.

Their functions (`inference.target.recurrent.install`) look up the running pass here. It is one of
three: prompts that are read into rows of a cache, a draft tree after committed rows, or packed
documents without a cache. If there is none, the library's own functions run.

Legend: B rows, R rows being prefilled, T positions, N nodes, K width of a convolution, S segments.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
from torch import Tensor

from heads.api.tree import TokenTree
from inference.target.padding import of_like_length
from inference.target.recurrent.states import Key, RecurrentStates, inputs_along_paths


@dataclass
class _CachedPass:
    """A pass over rows of a cache."""

    states: RecurrentStates
    _calls: Counter[tuple[int, str]] = field(default_factory=Counter, init=False)

    def key(self, mixer: int, kind: str) -> Key:
        """The key of a mixer's next state of a kind. A mixer that calls one function several times
        in a pass (Zamba, once per head) has as many states."""
        call = self._calls[mixer, kind]
        self._calls[mixer, kind] += 1
        return mixer, kind, call


@dataclass
class PromptPass(_CachedPass):
    """Right-padded prompts, or their next chunk.

    rows [R] int64: of the cache; valid [R, T] bool: tokens, not padding; fresh: this is the
    beginning of the prompts.
    """

    rows: Tensor
    valid: Tensor
    fresh: bool
    lengths: Tensor = field(init=False)
    """Tokens of this chunk [R] int64."""

    def __post_init__(self) -> None:
        self.lengths = self.valid.sum(1)

    def before(self, states: Tensor) -> Tensor:
        """The rows' states [R, ...] before this chunk."""
        return torch.zeros_like(states[self.rows]) if self.fresh else states[self.rows]


@dataclass
class TreePass(_CachedPass):
    """The nodes of a tree, after every row of the cache."""

    tree: TokenTree
    _back: dict[int, Tensor] = field(default_factory=dict, init=False)

    def back(self, width: int) -> Tensor:
        """`inputs_along_paths` of the tree, computed once per width."""
        if width not in self._back:
            self._back[width] = inputs_along_paths(self.tree, width)
        return self._back[width]


@dataclass
class PackedPass:
    """Consecutive documents in rows of T positions, without a cache.

    A recurrence does not stop at a document's end, so each document is read as a separate row.
    Documents of similar length are padded together; padding follows a document and does not change
    it.
    """

    groups: list[tuple[Tensor, Tensor]]
    """For every group: the places of its documents' positions in the concatenated rows,
    [S, longest] int64, and which of them are not padding, [S, longest] bool."""
    inverse: Tensor
    """The place of every position [B T] int64 among those of all groups without padding."""

    @classmethod
    def of(cls, segments: Tensor) -> PackedPass | None:
        """The pass for `segments` [B, T], in which equal neighbours are one document. None if every
        row is one document.

        It reads the lengths from the device.
        """
        length = segments.shape[1]
        starts = torch.ones_like(segments, dtype=torch.bool)
        starts[:, 1:] = segments[:, 1:] != segments[:, :-1]
        if not bool(starts[:, 1:].any()):
            return None
        first = starts.flatten().nonzero()[:, 0]
        end = torch.cat([first[1:], first.new_tensor([segments.numel()])])
        sizes = (end - first).tolist()
        groups = []
        for places in of_like_length(sizes):
            chosen = torch.tensor(places, device=segments.device)
            place = torch.arange(sizes[places[0]], device=segments.device)
            valid = place < (end - first)[chosen][:, None]
            index = (first[chosen][:, None] + place).clamp(max=segments.shape[0] * length - 1)
            groups.append((index, valid))
        order = torch.cat([index[valid] for index, valid in groups])
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(len(order), device=order.device)
        return cls(groups, inverse)

    def apart(self, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """Apply `function` to every document: it gets the inputs [B, T, ...] as [S, longest, ...],
        and its results in that form are returned as [B, T, ...]."""
        rows, length = inputs[0].shape[:2]
        flat = [value.flatten(0, 1) for value in inputs]
        found = [function(*(value[index] for value in flat))[valid] for index, valid in self.groups]
        together = torch.cat(found)[self.inverse]
        return together.unflatten(0, (rows, length))


Pass = PromptPass | TreePass | PackedPass
_RUNNING: ContextVar[Pass | None] = ContextVar("headstart_recurrent_pass", default=None)


@contextmanager
def running(now: Pass | None) -> Iterator[None]:
    """Within the block, recurrent layers follow the pass `now`."""
    token = _RUNNING.set(now)
    try:
        yield
    finally:
        _RUNNING.reset(token)


def current() -> Pass | None:
    """The running pass; None: the library's own functions run."""
    return _RUNNING.get()
