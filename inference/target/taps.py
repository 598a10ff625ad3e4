"""Taps: the residual stream after chosen layers, caught by forward hooks in the one place where
training and decoding both look.

Tap L is the stream after L layers; tap 0 the embeddings; the tap after the last layer comes before
the final norm (transformers' own last `hidden_states` entry is after it, which is why hooks are
used instead).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from heads.api.errors import UserError


class Taps:
    """Hooks on a model's decoder layers; `read` gives what the last forward pass left."""

    def __init__(self, layers: nn.ModuleList) -> None:
        self.layers = layers
        self._wanted: tuple[int, ...] = ()
        self._caught: dict[int, Tensor] = {}
        self._handles: list[Any] = []

    def want(self, taps: tuple[int, ...]) -> None:
        """Install hooks for exactly these taps; cheap when nothing changed."""
        if taps == self._wanted:
            return
        for handle in self._handles:
            handle.remove()
        self._handles = [self._hook(tap) for tap in taps]
        self._wanted = taps
        self._caught = {}

    def _hook(self, tap: int) -> Any:
        if tap == 0:

            def before(module: nn.Module, args: Any, kwargs: Any) -> None:
                self._caught[0] = args[0] if args else kwargs["hidden_states"]

            return self.layers[0].register_forward_pre_hook(before, with_kwargs=True)

        def after(module: nn.Module, args: Any, output: Any) -> None:
            self._caught[tap] = output[0] if isinstance(output, tuple) else output

        return self.layers[tap - 1].register_forward_hook(after)

    def read(self) -> Tensor | None:
        """The last forward pass's taps [B, T, n, H], ascending; None when none are wanted."""
        if not self._wanted:
            return None
        stacked = torch.stack([self._caught[tap] for tap in self._wanted], dim=2)
        self._caught = {}
        return stacked


def find_decoder(model: Any) -> Any:
    """A causal LM's text decoder, without head and vision tower."""
    decoder = model.get_decoder()
    # families whose prefix names a part that the text-only class does not have (Llama 4)
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
