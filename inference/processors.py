"""Processors that look at the text so far: repetition penalty, logit bias, bad words, at every node with its own prefix.

Legend: B rows, N nodes, S slots, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from heads.api.tree import TokenTree
from inference.sampling import SamplingSettings


@dataclass
class Prefix:
    """The text before every node.

    history [B, S] int64: committed tokens; the first `lengths` [B] of them stand before the root. tokens [B, N]: the nodes, root
    first. tree: who follows whom; a node's text is the history and the path from the root to it, itself included.
    """

    history: Tensor
    lengths: Tensor
    tokens: Tensor
    tree: TokenTree


def process(logits: Tensor, settings: SamplingSettings, prefix: Prefix) -> Tensor:
    """The target's logits [B, N, V] after the processors of `settings`."""
    return logits
