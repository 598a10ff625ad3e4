"""Counts the passes of Jacobi iteration until a block of tokens is stable.

Jacobi decoding (Santilli et al., 2305.10427) guesses a block of tokens and replaces every guess by
the target's pick after the guesses before it, in one pass for all of them. The block is stable once
a pass changes nothing; it is then what greedy decoding writes. A pass makes at least one more token
right, so a block of n tokens takes at most n passes.

Legend: B blocks of one text, N tokens of a block, T tokens of the longest prefix and its block, V
vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from heads.api.features import FeatureSpec
from inference.target.model import TargetModel

LAST = FeatureSpec((), last_hidden=True)


@torch.no_grad()
def passes_until_stable(
    target: TargetModel, text: Sequence[int], first: int, block: int
) -> list[int]:
    """For every whole block of `block` tokens of text[first:], which the target wrote greedily
    after text[:first]: the passes that changed a token of it, until none did. The first guess is
    the token before the block, repeated; the tokens before the block are those of the text."""
    starts = list(range(first, len(text) - block + 1, block))
    guesses = torch.tensor([[text[start - 1]] * block for start in starts])
    passes = [0] * len(starts)
    moving = list(range(len(starts)))
    while moving:
        found = picks(target, text, [starts[row] for row in moving], guesses[moving])
        changed = (found != guesses[moving]).any(1).tolist()
        guesses[moving] = found
        moving = [row for row, change in zip(moving, changed, strict=True) if change]
        for row in moving:
            passes[row] += 1
    return passes


def picks(
    target: TargetModel, text: Sequence[int], starts: Sequence[int], guesses: Tensor
) -> Tensor:
    """The target's greedy picks [B, N] for the places of guesses [B, N] that follow text[:start],
    each after the guesses before it."""
    count, block = guesses.shape
    longest = max(starts) + block
    tokens = torch.zeros(count, longest, dtype=torch.long)
    for row, start in enumerate(starts):
        tokens[row, :start] = torch.tensor(text[:start])
        tokens[row, start : start + block] = guesses[row]
    ends = torch.tensor(starts)[:, None] + block
    positions = torch.arange(longest).expand(count, -1)
    segments = (positions < ends).int()
    on = target.device
    _, last = target.features(tokens.to(on), positions.to(on), segments.to(on), LAST)
    assert last is not None
    before = ends - block - 1 + torch.arange(block)  # the state before each place of the block
    rows = torch.arange(count)[:, None]
    return target.weights.logits(last[rows.to(on), before.to(on)]).argmax(-1).cpu()
