"""Gradients taken in the forward pass are those of the backward pass, for less work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from heads.nn import losses
from heads.nn.early_gradient import with_gradient
from heads.nn.feature import base
from tests.heads.explicit import PAIR
from tests.heads.micro import micro_target, packed_batch
from tests.heads.recipes import build
from train.planning.footprint import FlopCount

STATES, LABELS = torch.randn(2, 5, 8, dtype=torch.float64), torch.arange(10).view(2, 5)
HEAD = torch.randn(11, 8, dtype=torch.float64)


def judge(states: Tensor, head: Tensor = HEAD) -> tuple[Tensor, Tensor]:
    logits = (states @ head.T).flatten(0, 1)
    values = losses.cross_entropy(logits, LABELS.flatten()).view(LABELS.shape)
    return values, logits.argmax(-1).view(LABELS.shape) == LABELS


def test_gradient_equals_finite_differences() -> None:
    weights = torch.rand(2, 5, dtype=torch.float64)

    def total(states: Tensor) -> Tensor:
        return (with_gradient(judge, states)[0] * weights).sum()

    assert torch.autograd.gradcheck(total, STATES.clone().requires_grad_())


def test_what_was_found_beside_the_losses_comes_along() -> None:
    states = STATES.clone().requires_grad_()
    values, hits = with_gradient(judge, states)
    assert torch.equal(values, judge(STATES)[0]) and torch.equal(hits, judge(STATES)[1])
    assert values.requires_grad and not hits.requires_grad


def test_without_gradients_nothing_is_taken() -> None:
    assert not with_gradient(judge, STATES)[0].requires_grad
    with torch.no_grad():
        assert not with_gradient(judge, STATES.clone().requires_grad_())[0].requires_grad


def test_rows_that_do_not_count_may_hold_anything() -> None:
    states = STATES.clone()
    states[0, 2] = torch.nan
    states.requires_grad_()
    losses.masked_sum(with_gradient(judge, states)[0].T, LABELS.T != 2).sum().backward()
    assert states.grad is not None
    assert not bool(states.grad[0, 2].any()) and bool(states.grad.isfinite().all())


def test_a_trained_weight_in_the_judge_is_our_mistake() -> None:
    head = HEAD.clone().requires_grad_()
    with pytest.raises(AssertionError, match="trained"):
        with_gradient(lambda states: judge(states, head), STATES.clone().requires_grad_())


def work(name: str, changes: dict[str, Any]) -> tuple[dict[str, Tensor], int]:
    """The gradients of a recipe's loss by weight, and the FLOPs of all its passes."""
    target = micro_target(torch.float64)
    drafter = build(name, target, shaken=0.1, changes=changes)
    batch = packed_batch(target, drafter.needs, [PAIR])
    with FlopCount() as count:
        drafter.loss(batch).loss_sum.backward()
    grads = {n: p.grad for n, p in drafter.named_parameters() if p.grad is not None}
    return grads, count.flops


@pytest.mark.parametrize("name", ["eagle3", "eagle", "medusa", "mtp", "peagle"])
def test_drafters_learn_the_same_for_less_work(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In chunks, as on long rows, where all that is as wide as the vocabulary would be computed
    again."""
    monkeypatch.setattr(losses, "CHUNK_ELEMENTS", 500)
    now, less = work(name, {})
    monkeypatch.setattr(base, "with_gradient", lambda judge, states: judge(states))
    plain: Callable[..., Any] = losses.sum_over_rows
    monkeypatch.setattr(losses, "sum_over_rows", lambda *given, recompute: plain(*given))
    later, more = work(name, {})
    assert now.keys() == later.keys() and now
    for weight, grad in now.items():
        torch.testing.assert_close(grad, later[weight], msg=weight)
    assert less < more
