"""A speculative vocabulary (SpecVocab, 2602.13836): at every step an LM head is computed exactly
only for a few tokens, which cheap scores choose from the whole draft vocabulary.

The scores are logits of low rank, up(down(h)): r (H + V') products in place of H V'. The k tokens
with the best scores are the shortlist; their logits are the LM head's. A static draft vocabulary
(FR-Spec, 2502.14856; `heads.nn.vocab`) leaves a token out in every context; the shortlist leaves it
out where it is unlikely. Both can be combined.

The drafter draws from one row of logits over all columns, which the rules also get: exact logits on
the shortlist, and far below them the scores, so that every token keeps some probability. With a
sharp edge, rounding would decide which tokens are on the shortlist, and training and decoding would
disagree. Therefore the logit changes gradually from one to the other, over the last tenth of the
way from the best score to the worst one on the shortlist.

Legend: M rows, H hidden, V' columns of the LM head, k tokens on the shortlist, r rank.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from heads.nn import init
from heads.nn.matrices import set_matrix

OUTSIDE = 8.0
"""How far below its score a token stands outside. Scores are brought to the level of the exact
logits first: those on the shortlist have the same sum of exponentials, each as far as it is in."""
EDGE = 0.1
"""Share of the way between the worst score on the shortlist and the best over which logits change
from outside to exact."""


class Shortlist(nn.Module):
    """Scores [..., V'] of states [..., H], and logits of an LM head on the shortlist. size: k."""

    def __init__(self, hidden: int, columns: int, size: int, rank: int) -> None:
        super().__init__()
        self.size = size
        self.down_proj = nn.Linear(hidden, rank, bias=False)
        self.up_proj = nn.Linear(rank, columns, bias=False)
        set_matrix(self.up_proj.weight, False)

    @torch.no_grad()
    def initialise(self, lm_head: Tensor) -> None:
        """Start as the best approximation of this rank of an LM head [V', H]."""
        rows = lm_head.float()
        # eigenvectors of a [H, H] matrix: the singular ones of [V', H] cost more
        directions = torch.linalg.eigh((rows.T @ rows).cpu().double()).eigenvectors
        best = directions[:, -self.down_proj.out_features :].T.to(rows)  # [r, H]
        init.copy(self.down_proj.weight, best)
        init.copy(self.up_proj.weight, rows @ best.T)

    def scores(self, states: Tensor) -> Tensor:
        """States [..., H] -> [..., V']."""
        return cast(Tensor, self.up_proj(self.down_proj(states)))

    def forward(self, states: Tensor, lm_head: nn.Linear) -> Tensor:
        """States [..., H] -> logits [..., V'], to draft from."""
        scores = self.scores(states)
        best, tokens = scores.topk(self.size, -1)  # [..., k]
        wide = torch.promote_types(scores.dtype, torch.float32)
        best, exact = best.to(wide), logits_of(states, lm_head, tokens).to(wide)
        above = best - best[..., -1:]
        edge = EDGE * above[..., :1]
        inside = torch.where(above >= edge, 1.0, above / edge.clamp(min=torch.finfo(wide).tiny))
        weight = inside.log()
        level = (exact + weight).logsumexp(-1) - (best + weight).logsumexp(-1) - OUTSIDE
        level = level[..., None]
        mixed = torch.lerp(best + level, exact, inside)
        return (scores.to(wide) + level).scatter(-1, tokens, mixed).to(scores.dtype)

    def holds(self, scores: Tensor, tokens: Tensor) -> Tensor:
        """Whether tokens [..., M] are on the shortlist of scores [..., M, V'] -> bool."""
        own = scores.gather(-1, tokens.expand(scores.shape[:-1])[..., None])
        return (scores > own).sum(-1) < self.size


def logits_of(states: Tensor, lm_head: nn.Linear, tokens: Tensor) -> Tensor:
    """The LM head's logits [..., k] of states [..., H], each for its own tokens [..., k].

    Their rows are read one by one if that is less than the whole matrix, as in drafting. A layer
    with low-rank updates (peft's, with a `base_layer`) has no rows that include them.
    """
    if tokens.numel() >= lm_head.out_features or hasattr(lm_head, "base_layer"):
        return cast(Tensor, lm_head(states)).gather(-1, tokens)
    rows = F.embedding(tokens, lm_head.weight)  # [..., k, H]
    return (rows @ states[..., None])[..., 0]
