"""What a training looks up in its packed rows before it begins.

Legend: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from train.data.pack import PackedData

PARITY_TOKENS = 48


def token_counts(data: PackedData, vocab_size: int) -> Tensor:
    """How often each token occurs in the supervised parts of the data: [V] int64."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for index in range(len(data)):
        row = data.row(index)
        counts += np.bincount(row.tokens[row.loss_mask], minlength=vocab_size)
    return torch.from_numpy(counts)


def parity_documents(data: PackedData, least: int) -> Iterator[list[int]]:
    """Documents of at least `least` tokens, cut to a length at which the check is quick."""
    for index in range(len(data)):
        row = data.row(index)
        for segment in range(1, int(row.segments.max()) + 1):
            tokens = row.tokens[row.segments == segment]
            if len(tokens) >= least:
                yield tokens[: max(least, PARITY_TOKENS)].tolist()
