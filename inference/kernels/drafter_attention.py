"""Attention of drafters over their caches by the tree attention kernel.

Meaning: `inference.kernels.reference.attention.tree_attention`. Torch's attention takes a mask over
all slots and reads them all; a captured or compiled step has to, whatever is committed. The kernel
reads the lengths and then what is committed. Drafters say what their queries see
(`heads.nn.drafting.sight`) and know no kernels; within `drafter_kernel` they attend by this one
where it runs, and by torch's attention elsewhere.

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
"""Queries of a row that the kernel takes: a level of a draft or a committed run. Those of a prompt
would need a bit for every token of it, and scratch memory by the hundreds of megabytes."""


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
    """Within the block drafters use the kernel where it runs."""
    return cache_kernel(drafter_attention)
