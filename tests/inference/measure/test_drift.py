"""How far one target is from another: against the definition written out, and against itself."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from heads.api.errors import UserError
from heads.api.features import FeatureSpec
from inference.decoding.requests import Request
from inference.measure.drift import greedy_answers, measure_drift
from inference.target.model import TargetModel
from tests.models import VOCAB, random_target

REQUESTS = [
    Request(
        7 + i,
        tuple(
            torch.randint(3, VOCAB, (4 + i,), generator=torch.Generator().manual_seed(i)).tolist()
        ),
        i,
        12,
    )
    for i in range(5)
]


def moved(amount: float) -> TargetModel:
    target = random_target()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for value in target.decoder.layers.parameters():
            value += amount * torch.randn(value.shape, generator=generator).to(value)
    return target


def test_a_target_has_not_moved_from_itself() -> None:
    found = measure_drift(random_target(), random_target(), REQUESTS)
    assert found.kl == pytest.approx(0.0, abs=1e-12)
    assert (found.agreement, found.identical) == (1.0, 1.0)
    assert found.prompts == len(REQUESTS)


def test_figures_equal_the_definition_written_out() -> None:
    original, changed = random_target(), moved(0.02)
    found = measure_drift(original, changed, REQUESTS)
    answers, others = (greedy_answers(target, REQUESTS, 1) for target in (original, changed))
    kl, agreeing, tokens = 0.0, 0, 0
    for request in REQUESTS:
        text = list(request.tokens)
        for token in answers[request.index]:
            rows = [one_step(target, text) for target in (original, changed)]
            p, q = (row.log_softmax(-1) for row in rows)
            kl += sum(math.exp(a) * (a - b) for a, b in zip(p.tolist(), q.tolist(), strict=True))
            assert int(rows[0].argmax()) == token
            agreeing += int(rows[1].argmax()) == token
            tokens += 1
            text.append(token)
    same = sum(answers[request.index] == others[request.index] for request in REQUESTS)
    assert found.tokens == tokens
    assert found.kl == pytest.approx(kl / tokens, rel=1e-6)
    assert found.agreement == pytest.approx(agreeing / tokens)
    assert found.identical == pytest.approx(same / len(REQUESTS))
    assert 0 < found.agreement < 1
    assert found.kl_ci95[0] <= found.kl <= found.kl_ci95[1]


def one_step(target: TargetModel, text: list[int]) -> torch.Tensor:
    """Logits [V] after a text, by prefill."""
    tokens = torch.tensor([text])
    cache = target.new_cache(1, len(text) + 1)
    logits, _ = target.prefill(
        cache, torch.tensor([0]), tokens, torch.tensor([len(text)]), FeatureSpec()
    )
    return logits[0]


def test_the_farther_the_farther() -> None:
    near, far = (
        measure_drift(random_target(), moved(amount), REQUESTS) for amount in (0.005, 0.05)
    )
    assert 0 < near.kl < far.kl
    assert near.agreement > far.agreement


def test_what_cannot_be_compared_is_refused() -> None:
    one, other = random_target(), random_target()
    with pytest.raises(UserError, match="no prompts to measure the drift on"):
        measure_drift(one, other, [])
    other.info = replace(other.info, tokenizer_hash="another")
    with pytest.raises(UserError, match="has another tokenizer"):
        measure_drift(one, other, REQUESTS)
