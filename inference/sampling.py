"""How the target's distribution is shaped before a token is picked from it: temperature and filters.

Legend: V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from heads.api.errors import UserError


@dataclass(frozen=True)
class SamplingSettings:
    """How the target's distribution is shaped. Filters act on the target only; drafts are ranked by their own distribution."""

    temperature: float = 0.0
    """0 picks the most likely token; 1 samples the model's own distribution."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens whose mass reaches this share; 1 keeps all."""
    min_p: float = 0.0
    """Keep tokens at least this share as likely as the most likely one; 0 keeps all."""

    def __post_init__(self) -> None:
        checks = {
            "temperature": (self.temperature >= 0, "0 or more"),
            "top_k": (self.top_k >= 0, "0 (off) or more"),
            "top_p": (0 < self.top_p <= 1, "above 0 and at most 1"),
            "min_p": (0 <= self.min_p <= 1, "between 0 and 1"),
        }
        for name, (fine, allowed) in checks.items():
            if not fine:
                raise UserError(f"decode.{name} must be {allowed}; given: {getattr(self, name)}.")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


def shape_logits(logits: Tensor, settings: SamplingSettings) -> Tensor:
    """Filtered and tempered logits [..., V] (at least float32; removed tokens are -inf). Temperature must be above 0.

    Order as in common engines: temperature first, then top-k, top-p and min-p on the tempered distribution.
    """
    scaled = logits.to(torch.promote_types(logits.dtype, torch.float32)) / settings.temperature
    if settings.top_k and settings.top_k < scaled.shape[-1]:
        kth = scaled.topk(settings.top_k, dim=-1).values[..., -1:]
        scaled = scaled.masked_fill(scaled < kth, float("-inf"))
    if settings.top_p < 1:
        ordered, index = scaled.sort(dim=-1, descending=True)
        probabilities = ordered.softmax(-1)
        before = probabilities.cumsum(-1) - probabilities  # mass of the strictly better tokens: the first token always stays
        removed = torch.zeros_like(scaled, dtype=torch.bool).scatter(-1, index, before >= settings.top_p)
        scaled = scaled.masked_fill(removed, float("-inf"))
    if settings.min_p > 0:
        floor = scaled.amax(-1, keepdim=True) + torch.log(scaled.new_tensor(settings.min_p))
        scaled = scaled.masked_fill(scaled < floor, float("-inf"))
    return scaled
