"""Taps: the residual stream after chosen layers, caught by forward hooks. Training and decoding
both read it here.

Tap L is the stream after L layers, tap 0 the embeddings. The tap after the last layer is before the
final norm. transformers' last `hidden_states` entry is after it, so hooks are used instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from heads.api.errors import UserError


@dataclass
class Seen:
    """The features of a forward pass.

    caught: taps [B, T, n, H], ascending, or None; places: the places of the requested ones among
    them (None: all); last_hidden: the normed last state [B, T, H].
    """

    caught: Tensor | None
    last_hidden: Tensor
    places: tuple[int, ...] | None = None

    @property
    def taps(self) -> Tensor | None:
        """The requested taps [B, T, n, H]; None if there were none."""
        if self.caught is None or self.places is None:
            return self.caught
        if not self.places:
            return None
        return torch.stack([self.caught[:, :, place] for place in self.places], dim=2)


class Joined:
    """The features of prompts [R, T], which are read in parts: each part is written to its place in
    tensors for all of them, so that no feature is held twice."""

    def __init__(self, rows: int, length: int) -> None:
        self.shape = rows, length
        self._whole: Seen | None = None

    @property
    def seen(self) -> Seen:
        """The features that were added."""
        assert self._whole is not None, "a prefill needs a prompt"
        return self._whole

    def put(self, rows: Tensor | None, offset: int, part: Seen) -> None:
        """Add the features of a part that begins at position `offset` of `rows` [R'] (None: of all
        rows)."""
        hidden, taps = part.last_hidden, part.taps
        if rows is None and hidden.shape[:2] == self.shape:
            self._whole = Seen(taps, hidden)
            return
        if self._whole is None:
            room = None if taps is None else taps.new_zeros(*self.shape, *taps.shape[2:])
            self._whole = Seen(room, hidden.new_zeros(*self.shape, hidden.shape[2]))
        place: Any = slice(None) if rows is None else rows, slice(offset, offset + hidden.shape[1])
        self._whole.last_hidden[place] = hidden
        if taps is not None and self._whole.caught is not None:
            self._whole.caught[place] = taps


class Taps:
    """Hooks on a model's decoder layers; `read` returns the features of the last forward pass."""

    def __init__(self, layers: nn.ModuleList) -> None:
        self.layers = layers
        self._wanted: tuple[int, ...] = ()
        self._hooked: tuple[int, ...] = ()
        self._caught: dict[int, Tensor] = {}
        self._handles: list[Any] = []
        self.shared: tuple[int, ...] = ()
        """Taps that every pass catches, requested or not: see `share`."""
        self.last: Seen | None = None
        """The features of the last pass, while taps are shared."""

    @contextmanager
    def share(self, taps: Iterable[int]) -> Iterator[None]:
        """Within the block, every pass also catches these taps, so that passes for drafters with
        different taps are the same computation."""
        before, self.shared = self.shared, tuple(sorted(set(taps)))
        try:
            yield
        finally:
            self.shared, self.last = before, None

    def want(self, taps: tuple[int, ...]) -> None:
        """Install hooks for these taps and the shared ones; cheap if nothing changes."""
        self._wanted = taps
        hooked = tuple(sorted({*taps, *self.shared}))
        if hooked == self._hooked:
            return
        for handle in self._handles:
            handle.remove()
        self._handles = [self._hook(tap) for tap in hooked]
        self._hooked = hooked
        self._caught = {}

    def _hook(self, tap: int) -> Any:
        if tap == 0:

            def before(module: nn.Module, args: Any, kwargs: Any) -> None:
                self._caught[0] = args[0] if args else kwargs["hidden_states"]

            return self.layers[0].register_forward_pre_hook(before, with_kwargs=True)

        def after(module: nn.Module, args: Any, output: Any) -> None:
            self._caught[tap] = output[0] if isinstance(output, tuple) else output

        return self.layers[tap - 1].register_forward_hook(after)

    def read(self, last_hidden: Tensor) -> Seen:
        """The features of the last forward pass. last_hidden: its normed last state [B, T, H]."""
        hooked, wanted = self._hooked, self._wanted
        if any(caught.ndim > last_hidden.ndim for caught in self._caught.values()):
            raise UserError(
                "this target keeps several residual streams between its layers (hyper-connections),"
                " so it has no state after a layer that a drafter can read. Use a kind that reads "
                "the last hidden state alone, such as head=medusa or head=eagle."
            )
        caught = [self._caught[tap].to(last_hidden.dtype) for tap in hooked]
        stacked = torch.stack(caught, dim=2) if hooked else None
        self._caught = {}
        places = None if wanted == hooked else tuple(hooked.index(tap) for tap in wanted)
        seen = Seen(stacked, last_hidden, places)
        self.last = seen if self.shared else None
        return seen


def find_decoder(model: Any) -> Any:
    """A causal LM's text decoder, without head and vision tower."""
    decoder = model.get_decoder()
    # in some families the prefix names a part that the text-only class lacks (Llama 4)
    if decoder is model:
        decoder = model.model
    return decoder


def find_layers(decoder: nn.Module, num_layers: int) -> nn.ModuleList:
    """A transformers model's list of decoder layers; raises `UserError` without one."""
    for module in decoder.modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            return module
    raise UserError(
        f"{type(decoder).__name__} has no list of {num_layers} decoder layers to tap; "
        "only decoder-only models with one layer list are supported as targets."
    )


FINAL_NORMS = (
    *("norm", "final_layernorm", "final_layer_norm", "final_norm"),
    *("ln_f", "norm_f", "embedding_norm"),
)
"""Names that families give to the norm after the last layer, in the module that has the layers."""


def find_final_norm(decoder: nn.Module, layers: nn.ModuleList) -> nn.Module | None:
    """The norm that turns the stream after the last layer into the last hidden state; None if it
    has another name."""
    holder = next(module for module in decoder.modules() if layers in module.children())
    found = (getattr(holder, name, None) for name in FINAL_NORMS)
    return next((module for module in found if isinstance(module, nn.Module)), None)
