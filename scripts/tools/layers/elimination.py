"""Nested sets of a target's layers, made by removing one layer after the other. A search starts
from them (`scripts.tools.layers.search`).

The next layer to remove is the one without which the target's next-token distributions on its own
text change least, by the divergence KL(p, q) from the whole target's p to the smaller one's q. One
forward pass over the text gives the divergence of a set, while tau needs decoding. A deep target
can lose many layers in this way before drafts get worse (ShortGPT, 2403.03853, removes layers by
another score).

Legend: M tokens of text, V vocabulary, L layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from inference.target.model import TargetModel
from inference.target.taps import find_layers

Kept = tuple[int, ...]
"""Numbers of the layers that are kept, ascending."""


def nested_sets(layers: int, divergence: Callable[[Kept], float]) -> list[Kept]:
    """The best sets of layers - 1, layers - 2, ..., 1 of `layers`, each without one layer of the
    set before it. It takes layers (layers + 1) / 2 calls of `divergence`."""
    kept, found = tuple(range(layers)), list[Kept]()
    while len(kept) > 1:
        smaller = [tuple(one for one in kept if one != left) for left in kept]
        kept = min(smaller, key=divergence)
        found.append(kept)
    return found


class Divergence:
    """The divergence of the target with only some layers from the whole target, in nats per token.

    documents: token ids of prompts with the target's responses. A call takes the kept layers and
    returns the mean of KL(p, q) over all tokens.
    """

    def __init__(self, target: TargetModel, documents: Sequence[Sequence[int]]) -> None:
        self.target = target
        self.documents = [torch.tensor([one], device=target.device) for one in documents]
        self.whole = self._log_probabilities(tuple(range(target.info.num_layers)))

    def __call__(self, kept: Kept) -> float:
        total, tokens = 0.0, 0
        for whole, part in zip(self.whole, self._log_probabilities(kept), strict=True):
            total += float((whole.exp() * (whole - part)).sum())
            tokens += len(whole)
        return total / tokens

    @torch.no_grad()
    def _log_probabilities(self, kept: Kept) -> list[Tensor]:
        """log p [M, V] float32 of every document."""
        found = []
        with only_layers(self.target, kept):
            for tokens in self.documents:
                logits = self.target.weights.logits(self.target.last_states(tokens)[0])
                found.append(logits.float().log_softmax(-1))
        return found


@contextmanager
def only_layers(target: TargetModel, kept: Kept) -> Iterator[None]:
    """Within the block, the target has only the layers `kept`."""
    layers = find_layers(target.decoder, target.info.num_layers)
    holder, name = next(
        (module, name)
        for module in target.decoder.modules()
        for name, child in module.named_children()
        if child is layers
    )
    setattr(holder, name, nn.ModuleList([layers[one] for one in kept]))
    try:
        yield
    finally:
        setattr(holder, name, layers)
