"""The statistics of the audit: sampled text against the exact distribution.

Legend: M texts of equal length, T tokens, V vocabulary.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from heads.api.tree import TokenTree
from inference.decoding.sampling.distribution import SamplingSettings, shape_logits
from inference.decoding.sampling.processors import Prefix, process
from inference.target.model import TargetModel

Text = tuple[int, ...]

FEWEST_EXPECTED = 5.0
"""Texts with fewer expected samples are pooled: chi-square is an approximation for larger
counts."""


@torch.no_grad()
def exact_distribution(
    target: TargetModel, prompt: Sequence[int], sampling: SamplingSettings, length: int
) -> dict[Text, float]:
    """Probability of every answer of at most `length` tokens, by enumeration.

    Every text is read in one causal pass from its beginning, without cache, verification or
    drafting. Use it only with filters that leave few tokens (top-k), as the number of answers grows
    exponentially with `length`.
    """
    found: dict[Text, float] = {}
    open_texts: dict[Text, float] = {(): 1.0}
    for _ in range(length):
        answers = list(open_texts)
        tokens = torch.tensor([[*prompt, *answer] for answer in answers], device=target.device)
        logits = target.weights.logits(target.last_states(tokens)[:, -1:])
        lengths = torch.full((len(answers),), tokens.shape[1] - 1, device=target.device)
        root = TokenTree.chain(0, target.device)
        logits = process(logits, sampling, Prefix(tokens, lengths, tokens[:, -1:], root))
        shares = shape_logits(logits, sampling)[:, 0].double().softmax(-1)
        grown: dict[Text, float] = {}
        for answer, row in zip(answers, shares, strict=True):
            for token in row.nonzero()[:, 0].tolist():
                texts = found if token in target.eos_token_ids else grown
                texts[(*answer, token)] = open_texts[answer] * float(row[token])
        open_texts = grown
    return found | open_texts


def entropy(distribution: dict[Text, float]) -> float:
    """The entropy in nats."""
    return -sum(share * math.log(share) for share in distribution.values() if share > 0)


@dataclass(frozen=True)
class ChiSquare:
    """Pearson's test. cells: classes after pooling; impossible: samples of probability 0."""

    statistic: float
    degrees: int
    p_value: float
    cells: int
    impossible: int


def chi_square(samples: Iterable[Text], distribution: dict[Text, float]) -> ChiSquare:
    """Test whether the samples follow the distribution. p_value is 0 if one of them has probability
    0."""
    counts = Counter(samples)
    total = sum(counts.values())
    impossible = sum(count for text, count in counts.items() if distribution.get(text, 0.0) == 0.0)
    pairs: list[tuple[float, float]] = []  # (seen, expected)
    rare_seen, rare_expected = 0.0, 0.0
    for text, share in distribution.items():
        if share * total >= FEWEST_EXPECTED:
            pairs.append((counts[text], share * total))
        else:
            rare_seen, rare_expected = rare_seen + counts[text], rare_expected + share * total
    pairs.sort(key=lambda pair: pair[1])
    # too few for a separate class: join the smallest
    if pairs and rare_expected < FEWEST_EXPECTED:
        rare_seen, rare_expected = rare_seen + pairs[0][0], rare_expected + pairs.pop(0)[1]
    pairs.append((rare_seen, rare_expected))
    statistic = sum((seen - expected) ** 2 / expected for seen, expected in pairs)
    degrees = max(len(pairs) - 1, 1)
    halves = torch.tensor([degrees / 2, statistic / 2], dtype=torch.float64)
    p_value = 0.0 if impossible else float(torch.special.gammaincc(halves[0], halves[1]))
    return ChiSquare(statistic, degrees, p_value, len(pairs), impossible)
