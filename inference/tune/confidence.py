"""The least probability of a drafted token, for engines that end a chain before a token below it
(llama.cpp's `--spec-draft-p-min`).

The survey drafts a greedy chain at every position of the target's texts, and records which of its
tokens would be accepted and how probable the drafter held them. So the passes that any threshold
would need follow exactly: a draft ends before its first token below the threshold, and the next
pass begins after the accepted tokens and the target's own.

Legend: B rows, D drafted tokens of a chain, V' drafted vocabulary, P positions of a text, C
candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from heads.api.drafter import Proposal, TrainableDrafter
from inference.decoding.requests import PassRecord
from inference.engines.settings import CONSIDERED

CANDIDATES = tuple(twentieths / 20 for twentieths in range(20))
"""Thresholds to choose from; 0 ends no chain."""


def method_of(drafter: Any) -> str:
    """The engines' name of a drafter (`Kind.export_method`); empty for those without weights."""
    trainable = isinstance(drafter, TrainableDrafter)
    return type(drafter).export_method(drafter.config) if trainable else ""


def confidences(proposal: Proposal) -> Tensor | None:
    """The probability [B, D] of each token of a greedy chain as llama.cpp computes it: among the
    drafter's `CONSIDERED` best tokens. None if the drafter has no probabilities."""
    if proposal.logits is None:
        return None
    logits = proposal.logits[:, :-1]  # [B, D, V']
    best = logits.topk(min(CONSIDERED, logits.shape[-1]), dim=-1).values
    return best.float().softmax(-1)[..., 0]


def best_threshold(texts: Sequence[Sequence[PassRecord]], seconds: Sequence[float]) -> float:
    """The candidate with the highest speed, the lowest of equal ones; see `speeds`."""
    found = speeds(texts, seconds)
    return CANDIDATES[found.index(max(found))]


def speeds(texts: Sequence[Sequence[PassRecord]], seconds: Sequence[float]) -> list[float]:
    """Tokens per second of each candidate. texts: for each, a pass at every position, with
    confidences; seconds [D+1]: of a step by the number of drafted tokens."""
    tokens, spent = 0, np.zeros(len(CANDIDATES))
    for records in texts:
        tokens += len(records)
        least = np.minimum.accumulate([record.confidence for record in records], axis=1)  # [P, D]
        drafted = (least >= np.array(CANDIDATES)[:, None, None]).sum(-1)  # [C, P]
        accepted = np.array([record.accepted for record in records])
        after = np.arange(len(records)) + np.minimum(accepted, drafted) + 1  # [C, P]: next pass
        for candidate, (counts, following) in enumerate(
            zip(drafted.tolist(), after.tolist(), strict=True)
        ):
            place = 0
            while place < len(records):
                spent[candidate] += seconds[counts[place]]
                place = following[place]
    return (tokens / spent).tolist()
