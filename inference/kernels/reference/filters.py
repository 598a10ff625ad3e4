"""Top-k, top-p and min-p row by row, in plain torch. `filter_logits.py` has the Triton kernel.

All three keep the tokens whose logit is at least a threshold, so tokens of equal logits are kept or
removed together. Top-k keeps the k best tokens and those equal to the last of them. Top-p keeps the
tokens for which the strictly better ones have less than p of the mass that top-k has left. Min-p
keeps the tokens with at least that share of the best token's probability.

Legend: R rows with separate settings, M positions of each, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from heads.kernels.dispatch import Op


def filter_logits(scaled: Tensor, top_k: Tensor, top_p: Tensor, log_min_p: Tensor) -> Tensor:
    """Tempered logits [R, M, V] with removed tokens at -inf.

    top_k [R] int64: V or more keeps all; top_p [R] in (0, 1]: 1 keeps all; log_min_p [R]: -inf
    keeps all. The best token always stays.
    """
    k, p, floor = (
        part[:, None, None].expand(-1, scaled.shape[1], 1) for part in (top_k, top_p, log_min_p)
    )
    ordered = scaled.sort(dim=-1, descending=True).values
    kth = ordered.gather(-1, (k - 1).clamp(0, scaled.shape[-1] - 1))
    ordered = ordered.masked_fill(ordered < kth, float("-inf"))
    probabilities = ordered.softmax(-1)
    # mass of the tokens before: among equal logits it exceeds that of the strictly better ones, but
    # the first of them decides for all
    before = probabilities.cumsum(-1) - probabilities
    kept = torch.where(p < 1, (before < p).sum(-1, keepdim=True), scaled.shape[-1]).clamp(min=1)
    last = ordered.gather(-1, kept - 1)
    threshold = torch.maximum(torch.maximum(kth, last), ordered[..., :1] + floor)
    return scaled.masked_fill(scaled < threshold, float("-inf"))


FILTER_LOGITS = Op(
    "filter_logits",
    filter_logits,
    "inference.kernels.filter_logits:filter_logits",
    (torch.float32,),
)
