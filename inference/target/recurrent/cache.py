"""The cache of a target with recurrent layers: keys and values in slots, and recurrent states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from heads.api.tree import TokenTree
from inference.target.kv_cache import KVCache, LayerShape
from inference.target.recurrent.states import Key, RecurrentStates, StateShape


class RecurrentCache(KVCache):
    """A `KVCache` whose rows also have recurrent states.

    states: the result of `states.shapes()` of an earlier cache of the same model.
    """

    def __init__(
        self,
        num_layers: int,
        rows: int,
        capacity: int,
        shapes: Sequence[LayerShape | None] | None = None,
        states: Mapping[Key, StateShape] | None = None,
    ) -> None:
        super().__init__(num_layers, rows, capacity, shapes)
        self.states = RecurrentStates(rows, states)

    def bytes(self) -> int:
        return super().bytes() + self.states.bytes()

    def first_rows(self, count: int) -> RecurrentCache:
        part = RecurrentCache(len(self.layers), count, self.capacity)
        self._share_rows(part)
        part.states = self.states.first_rows(count)
        return part

    def move_row(self, source: int, target: int) -> None:
        super().move_row(source, target)
        self.states.move_row(source, target)

    def commit(
        self, tree: TokenTree, lengths: Tensor, path: Tensor, accepted: Tensor, committed: Tensor
    ) -> None:
        super().commit(tree, lengths, path, accepted, committed)
        self.states.commit(tree, path, committed)

    # What recurrent layers request from transformers' caches. They get no state: a layer with one
    # would use its branch for one token, which does not support trees and changes the state.

    def get_conv_state(self, *args: Any, **kwargs: Any) -> None:
        return None

    def get_recurrent_state(self, *args: Any, **kwargs: Any) -> None:
        return None

    def has_previous_state(self, *args: Any, **kwargs: Any) -> bool:
        return False

    def is_recording_past(self, *args: Any, **kwargs: Any) -> bool:
        return False

    def update_conv_state(self, conv_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Called before a convolution, which handles its window itself."""
        return conv_states

    def update_recurrent_state(self, recurrent_states: Any, *args: Any, **kwargs: Any) -> Any:
        """Called after a scan, which has stored its state itself."""
        return recurrent_states
