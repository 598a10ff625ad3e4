"""Indexed attention: layers whose attention sees only the keys that an indexer scores highest.

DeepSeek sparse attention (2512.02556; DeepSeek V3.2, GLM-5 and relatives): the query of token i has
with the key of token j the score

    s_ij = sum over the indexer's heads h of w_ih relu(q_ih . k_j)

and token i attends to the `index_topk` visible keys of the highest scores. The models compute this
themselves; what they need is here: the indexer's own keys in slots beside the other ones, so that a
commit moves them too, and the mask of the running pass, in which a tree's nodes see their ancestors
alone.

Where every relu is 0 the scores of several keys are equal. Which of them are chosen must not depend
on their slots, which are other ones in a tree than in a chain, so the mask adds a number to each
score that grows with the key's position and is far too small to change the order of other scores:
of equal keys the later ones are chosen. Up to `index_topk` visible keys all are chosen, and
attention is the usual one.

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
"""What a key's score gains by a position. Scores are float32, where 1 is changed by 1e-7."""


def masks(plan: AttentionPlan) -> dict[str, Tensor | None]:
    """What a model with indexers takes as its attention mask: for layers of each type the mask of a
    pass, [B|1, 1, N, S] float32 for those that choose by it."""
    allowed = plan.allowed_within(None)
    keys = plan.key_positions[:, None, :]
    scores = LATER * keys.float().expand(-1, plan.query_positions.shape[1], -1)
    if allowed is not None:
        scores = torch.where(allowed, scores, -torch.inf)
    return {LAYER_TYPE: scores[:, None], "full_attention": None, "sliding_attention": None}


class IndexedCache(KVCache):
    """A `KVCache` that holds the keys of L indexers as well: as the keys of L further layers that
    have no values."""

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
        """Store the indexer keys [B, T, C] of a layer -> those that its queries are scored with
        [B, S, C]."""
        keys = keys[:, None]
        stored, _ = self.layers[len(self.layers) // 2 + layer_idx].update(keys, keys[..., :0])
        return stored[:, 0]
