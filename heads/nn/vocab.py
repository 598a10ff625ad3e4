"""A reduced draft vocabulary (FR-Spec, 2502.14856): the most frequent tokens, and the maps between
draft ids and target ids.

The maps are stored as vLLM and SGLang read them for EAGLE-3: `d2t[i]` is the OFFSET
target id minus draft id, `t2d[j]` says whether target token j is in the draft vocabulary; draft ids
are in ascending order of target ids.

Legend: V target vocabulary, V' draft vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from heads.api.errors import UserError


def most_frequent(counts: Tensor, size: int) -> Tensor:
    """Target ids [V'] int64, ascending, of the `size` largest counts [V], lower ids first."""
    if not 0 < size <= counts.shape[0]:
        raise UserError(
            "head.draft_vocab_size must lie between 1 and the target's vocabulary of "
            f"{counts.shape[0]}; given {size}. Use 0 for the full vocabulary."
        )
    order = torch.sort(counts, descending=True, stable=True).indices
    return order[:size].sort().values


def to_maps(target_ids: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """(d2t [V'] int64, t2d [V] bool) of ascending target ids [V']."""
    offsets = target_ids - torch.arange(target_ids.shape[0], device=target_ids.device)
    known = torch.zeros(vocab_size, dtype=torch.bool, device=target_ids.device)
    known[target_ids] = True
    return offsets, known


def to_target_ids(d2t: Tensor) -> Tensor:
    """Target ids [V'] int64 of the draft columns."""
    return d2t + torch.arange(d2t.shape[0], device=d2t.device)
