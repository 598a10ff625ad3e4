"""Measures how training changes a target's behaviour, on greedy answers to held-out prompts.

Speculative decoding never changes a target's text; training the target does (Medusa-2, LayerSkip).
Three figures: the mean of KL(p_original || p_new) per answer token, the share of answer tokens at
which both targets pick the same next token, and the share of prompts whose greedy answers are
identical. The first two are computed along the original's answers. Intervals are over prompts
(`inference.measure.metrics`).

    drift = measure_drift(original, changed, requests)

Legend: T positions, V vocabulary, M answer tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from heads.api.errors import UserError
from heads.nn.losses import kl_divergence
from inference.decoding.config import DecodeConfig
from inference.decoding.engine import Engine
from inference.decoding.requests import Request
from inference.measure.metrics import divide, interval95, resample_weights
from inference.target.memory import in_rows_that_fit
from inference.target.model import TargetModel


@dataclass(frozen=True)
class Drift:
    """A new target against its original. tokens: answer tokens compared; prompts: answers."""

    kl: float
    kl_ci95: tuple[float, float]
    agreement: float
    agreement_ci95: tuple[float, float]
    identical: float
    identical_ci95: tuple[float, float]
    tokens: int
    prompts: int

    def to_dict(self) -> dict[str, float | list[float]]:
        """Plain JSON values."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in vars(self).items()}


def measure_drift(
    original: TargetModel,
    changed: TargetModel,
    requests: Sequence[Request],
    rows: int = 8,
    setting: str = "rows",
) -> Drift:
    """Compare two targets on the greedy answers to `requests`, decoded in `rows` rows or as many as
    fit into memory (setting: what gives `rows`); raises `UserError` without any request, when not
    even one row fits, or when the vocabularies differ."""
    if original.info.tokenizer_hash != changed.info.tokenizer_hash:
        raise UserError(
            f"'{changed.info.id}' has another tokenizer than '{original.info.id}', so their "
            "answers cannot be compared."
        )
    if not requests:
        raise UserError(
            "there are no prompts to measure the drift on. Give some with train.prompts."
        )
    answers, others = (
        in_rows_that_fit(partial(greedy_answers, one, requests), rows, len(requests), setting)[0]
        for one in (original, changed)
    )
    counts = []
    for request in requests:
        answer = answers[request.index]
        one, other = (
            _log_probabilities(target, request.tokens, answer) for target in (original, changed)
        )
        other = other.to(one.device)
        kl, equal = kl_divergence(one, other).sum(), one.argmax(-1) == other.argmax(-1)
        same = answer == others[request.index]
        counts.append([float(kl), int(equal.sum()), len(answer), same, 1])
    sums = np.array(counts, dtype=np.float64)  # [P, 5]: KL, agreeing tokens, tokens, identical, 1
    kl, agreeing, tokens, identical, prompts = sums.sum(0)
    drawn = resample_weights(len(requests), seed=0) @ sums
    return Drift(
        kl=divide(kl, tokens),
        kl_ci95=interval95(drawn[:, 0], drawn[:, 2]),
        agreement=divide(agreeing, tokens),
        agreement_ci95=interval95(drawn[:, 1], drawn[:, 2]),
        identical=divide(identical, prompts),
        identical_ci95=interval95(drawn[:, 3], drawn[:, 4]),
        tokens=int(tokens),
        prompts=int(prompts),
    )


def greedy_answers(
    target: TargetModel, requests: Sequence[Request], batch_size: int
) -> dict[int, list[int]]:
    """Each request's greedy answer by the request's index."""
    longest = max(request.max_new_tokens for request in requests)
    decode = DecodeConfig(shape="none", batch_size=batch_size, max_new_tokens=longest)
    return {done.request.index: done.tokens for done in Engine(target, None, decode).run(requests)}


@torch.no_grad()
def _log_probabilities(target: TargetModel, prompt: Sequence[int], answer: Sequence[int]) -> Tensor:
    """log p [M, V] of every answer token, in float32 or float64."""
    tokens = torch.tensor([[*prompt, *answer]], device=target.device)
    logits = target.weights.logits(target.last_states(tokens)[0, len(prompt) - 1 : -1])
    return logits.log_softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
