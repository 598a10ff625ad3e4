"""Indexed attention: layers whose attention sees only the keys that an indexer scores highest.

In DeepSeek sparse attention (2512.02556; DeepSeek V3.2, GLM-5 and relatives), the score of token
i's query with token j's key is

    s_ij = sum over the indexer's heads h of w_ih relu(q_ih . k_j)

Token i attends to the `index_topk` visible keys with the highest scores. The models compute this
themselves. This module provides what they need: slots for the indexer's keys, so that a commit
moves them too, and the mask of the running pass, in which a tree's nodes see only their ancestors.

If every relu is 0, the scores of several keys are equal. The choice among them must not depend on
their slots, which differ between a tree and a chain. So the mask adds to each score a number that
grows with the key's position and is far too small to change the order of other scores: of equal
keys, the later ones are chosen. If at most `index_topk` keys are visible, all are chosen, and this
is ordinary attention.

Legend: B rows, T fresh tokens, N nodes or tokens, S slots, C numbers per indexer key, L layers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from inference.target.attention import AttentionPlan
from inference.target.kv_cache import KVCache, LayerShape

LAYER_TYPE = "indexed_attention"
LATER = 1e-30
"""Amount added to a key's score per position. Scores are float32, where 1e-7 changes 1."""


def masks(plan: AttentionPlan) -> dict[str, Tensor | None]:
    """The attention mask argument of a model with indexers: for each type of layer the mask of a
    pass, [B|1, 1, N, S] float32 for layers with an indexer."""
    allowed = plan.allowed_within(None)
    keys = plan.key_positions[:, None, :]
    scores = LATER * keys.float().expand(-1, plan.query_positions.shape[1], -1)
    if allowed is not None:
        scores = torch.where(allowed, scores, -torch.inf)
    return {LAYER_TYPE: scores[:, None], "full_attention": None, "sliding_attention": None}


class IndexedCache(KVCache):
    """A `KVCache` that also holds the keys of L indexers, as the keys of L further layers without
    values."""

    def __init__(
        self,
        num_layers: int,
        rows: int,
        capacity: int,
        shapes: Sequence[LayerShape | None] | None = None,
    ) -> None:
        super().__init__(2 * num_layers, rows, capacity, shapes)

    def first_rows(self, count: int) -> IndexedCache:
        part = IndexedCache(len(self.layers) // 2, count, self.capacity)
        self._share_rows(part)
        return part

    def update_indexer(self, keys: Tensor, layer_idx: int) -> Tensor:
        """Store the indexer keys [B, T, C] of a layer; returns the keys [B, S, C] to score its
        queries with."""
        keys = keys[:, None]
        stored, _ = self.layers[len(self.layers) // 2 + layer_idx].update(keys, keys[..., :0])
        return stored[:, 0]
