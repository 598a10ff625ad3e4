"""Attention of drafters over their caches with the tree attention kernel.

Reference: `inference.kernels.reference.attention.tree_attention`. Torch's attention takes a mask
over all slots and reads all of them, which in a captured or compiled step means the whole cache.
The kernel reads the lengths and then only the committed slots. Drafters specify what their queries
see (`heads.nn.drafting.sight`) and do not depend on kernels. Within `drafter_kernel` they use this
kernel if it runs on the device, and torch's attention otherwise.

Legend: B rows, Q queries, S slots, h query heads, g key/value heads, D head size, E value size.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import cast

from torch import Tensor

from heads.kernels.dispatch import choose
from heads.nn.drafting.sight import Sight, cache_kernel
from inference.kernels.reference.attention import TREE_ATTENTION

MOST_QUERIES = 64
"""Most queries of a row for the kernel: enough for a level of a draft or a committed run. A
prompt's queries would each need a bit per token, and hundreds of megabytes of scratch memory."""


def drafter_attention(
    query: Tensor, key: Tensor, value: Tensor, sight: Sight, window: int
) -> Tensor | None:
    """query [B, Q, h, D], key [B, S, g, D], value [B, S, g, E] -> [B, Q, h * E], or None; see
    `heads.nn.drafting.sight.CacheKernel`."""
    implementation = choose(TREE_ATTENTION, query.device, query.dtype).implementation
    if implementation == "reference" or query.shape[1] > MOST_QUERIES:
        return None
    states = (each.transpose(1, 2) for each in (query, key, value))
    tree = sight.base, sight.words, sight.depth
    limits = {"scaling": query.shape[-1] ** -0.5, "window": window or None, "at": sight.at}
    return cast(Tensor, TREE_ATTENTION(*states, *tree, **limits)).flatten(2)


def drafter_kernel() -> AbstractContextManager[None]:
    """Within the block, drafters use the kernel if it runs on their device."""
    return cache_kernel(drafter_attention)
