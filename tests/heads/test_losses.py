"""Losses against their textbook formulas, their gradients against finite differences; autocast."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from heads.kernels.reference.row_losses import ROW_LOSSES
from heads.nn import chunks, losses
from heads.nn.block.confidence import confidence_loss
from heads.nn.block.losses import Objective
from heads.nn.distillation import OBJECTIVES, ObjectiveConfig, compare, objective

PAIRS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "forward_kl": (losses.forward_kl, lambda q, p: (p * (p / q).log()).sum()),
    "reverse_kl": (losses.reverse_kl, lambda q, p: (q * (q / p).log()).sum()),
    "jsd": (
        lambda a, b: losses.jensen_shannon(a, b, 0.3),
        lambda q, p: (
            0.3 * (p * (p / (0.3 * p + 0.7 * q)).log()).sum()
            + 0.7 * (q * (q / (0.3 * p + 0.7 * q)).log()).sum()
        ),
    ),
    "tv": (losses.total_variation, lambda q, p: 1 - torch.minimum(p, q).sum()),
    "acceptance_nll": (losses.acceptance_nll, lambda q, p: -torch.minimum(p, q).sum().log()),
    "soft_cross_entropy": (
        lambda a, b: losses.soft_cross_entropy(a, b.softmax(-1)),
        lambda q, p: -(p * q.log()).sum(),
    ),
}


def logits() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return tuple(3 * torch.randn(5, 7, dtype=torch.float64, generator=generator) for _ in range(2))


@pytest.mark.parametrize("name", PAIRS)
def test_value_equals_the_formula(name: str) -> None:
    loss, formula = PAIRS[name]
    drafted, target = logits()
    expected = torch.stack(
        [formula(q, p) for q, p in zip(drafted.softmax(-1), target.softmax(-1), strict=True)]
    )
    torch.testing.assert_close(loss(drafted, target), expected)


@pytest.mark.parametrize("name", PAIRS)
def test_gradient_equals_finite_differences(name: str) -> None:
    drafted, target = logits()
    assert torch.autograd.gradcheck(lambda x: PAIRS[name][0](x, target), drafted.requires_grad_())


def annealed(drafted: Tensor, target: Tensor, *more: Any) -> Tensor:
    """With the mean acceptance of all positions if none is given."""
    divergence, distance = (f(drafted, target) for f in (losses.forward_kl, losses.total_variation))
    return losses.annealed_lk(divergence, distance, *(more or (1.0 - distance.detach().mean(),)))


def test_annealed_lk_weighs_by_the_acceptance_rate() -> None:
    """w = exp(-eta alpha) with alpha as given, and no gradient in w."""
    drafted, target = logits()
    q, p = drafted.softmax(-1), target.softmax(-1)
    rates = torch.minimum(p, q).sum(-1)
    kl = (p * (p / q).log()).sum(-1)
    for alpha in (rates.mean(), rates):
        weight = torch.exp(-2.0 * alpha)
        found = annealed(drafted, target, alpha, 2.0)
        torch.testing.assert_close(found, weight * kl + (1 - weight) * (1 - rates))
    fixed = torch.exp(-3.0 * rates.mean())

    def expected(x: Tensor) -> Tensor:
        return (
            fixed * losses.forward_kl(x, target) + (1 - fixed) * losses.total_variation(x, target)
        ).sum()

    grads = [
        torch.autograd.grad(loss(drafted.requires_grad_()).sum(), drafted)[0]
        for loss in (expected, lambda x: annealed(x, target))
    ]
    torch.testing.assert_close(*grads)


def test_acceptance_nll_has_a_gradient_where_total_variation_has_none() -> None:
    """The reason for L_alpha: where p and q hardly overlap, TV is flat."""
    drafted = torch.tensor([[20.0, 0.0, 0.0]], dtype=torch.float64, requires_grad=True)
    target = torch.tensor([[0.0, 20.0, 0.0]], dtype=torch.float64)
    steep, flat = (
        torch.autograd.grad(loss(drafted, target).sum(), drafted)[0].abs().max()
        for loss in (losses.acceptance_nll, losses.total_variation)
    )
    assert steep > 0.4 and flat < 1e-7


@pytest.mark.parametrize("name", ["forward_kl", "reverse_kl", "jsd", "tv", "acceptance_nll"])
def test_a_distribution_has_no_distance_from_itself(name: str) -> None:
    drafted, _ = logits()
    torch.testing.assert_close(
        PAIRS[name][0](drafted, drafted + 2.5), torch.zeros(5, dtype=torch.float64)
    )


@pytest.mark.parametrize("name", PAIRS)
def test_certain_distributions_stay_finite(name: str) -> None:
    drafted = torch.tensor([[80.0, -80.0, 0.0]], dtype=torch.float32, requires_grad=True)
    value = PAIRS[name][0](drafted, drafted.detach().flip(-1))
    value.sum().backward()
    assert torch.isfinite(value).all()
    assert torch.isfinite(drafted.grad).all()


def test_half_precision_is_computed_in_float32() -> None:
    drafted, target = (values.bfloat16() for values in logits())
    for name, (loss, _) in PAIRS.items():
        value = (
            loss(drafted, target) if name != "soft_cross_entropy" else loss(drafted, target.float())
        )
        assert value.dtype == torch.float32
        torch.testing.assert_close(value, loss(drafted.float(), target.float()))
    labels = torch.tensor([0, 1, 2, 3, 4])
    assert losses.cross_entropy(drafted, labels).dtype == torch.float32


def soft(logits: Tensor) -> Tensor:
    return losses.widen(logits).softmax(-1)


def mixed(name: str, temperature: float) -> Callable[[Tensor, Tensor], Tensor]:
    """One objective of distilled drafters."""
    config = ObjectiveConfig(**{"forward_kl": 0.0, name: 0.7, "temperature": temperature})
    alpha = torch.tensor(0.6)
    return lambda q, p: objective(config, compare(config, q, p, p.argmax(-1)), alpha)


def test_distractors_cost_what_the_target_holds_against_them() -> None:
    """sum q(x) max(0, z(y) - z(x)), with a gradient for the drafter alone."""
    drafted, target = logits()
    labels = torch.tensor([0, 3, 6, 2, 2])
    expected = torch.stack(
        [
            sum(q[x] * max(0.0, float(z[y] - z[x])) for x in range(7))
            for q, z, y in zip(drafted.softmax(-1), target, labels, strict=True)
        ]
    )
    torch.testing.assert_close(losses.distractor_penalty(drafted, target, labels), expected)
    assert torch.autograd.gradcheck(
        lambda x: losses.distractor_penalty(x, target, labels), drafted.requires_grad_()
    )
    aware = target.clone().requires_grad_()
    losses.distractor_penalty(drafted, aware, labels).sum().backward()
    assert aware.grad is None


BLOCK = Objective(0.3, 0.5, 0.4, 0.2, 0.1)
UNDER_AUTOCAST: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    **{name: loss for name, (loss, _) in PAIRS.items() if name != "soft_cross_entropy"},
    "soft_cross_entropy": lambda q, p: losses.soft_cross_entropy(q, soft(p)),
    "cross_entropy": lambda q, p: losses.cross_entropy(q, p.argmax(-1)),
    "annealed_lk": annealed,
    "top_k_cross_entropy": lambda q, p: losses.top_k_cross_entropy(q[None], soft(p), 9)[0],
    "feature_distance": losses.feature_distance,
    "distractor_penalty": lambda q, p: losses.distractor_penalty(q, p, p.argmax(-1)),
    "kl_divergence": lambda q, p: losses.kl_divergence(soft(p).log(), soft(q).log()),
    "confidence_loss": lambda q, p: confidence_loss(q[:, 0], soft(p)[:, 0]),
    "block_objective": lambda q, p: BLOCK.ends(ROW_LOSSES(q, p, p.argmax(-1), BLOCK.names)),
    **{f"distilled_{name}": mixed(name, 1.0) for name in OBJECTIVES},
    **{f"distilled_{name}_at_0.7": mixed(name, 0.7) for name in OBJECTIVES if name != "ce"},
}
"""Losses and divergences of (drafted logits, target's logits), of any dtype."""


def sharp_logits(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Logits of the size that language models have, the drafted ones near the target's."""
    generator = torch.Generator().manual_seed(1)
    target = 10 + 5 * torch.randn(64, 300, generator=generator)
    drafted = target + 0.3 * torch.randn(64, 300, generator=generator)
    return drafted.to(dtype), target.to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", UNDER_AUTOCAST)
def test_value_and_gradient_under_autocast_equal_float64s(name: str, dtype: torch.dtype) -> None:
    loss, (drafted, target) = UNDER_AUTOCAST[name], sharp_logits(dtype)
    exact = drafted.double().requires_grad_()
    expected = loss(exact, target.double())
    given = drafted.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        found = loss(given, target)
    assert found.dtype == torch.float32
    # Losses are differences of sums of the logits' size: up to 40, where float32 steps by 4e-6.
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=3e-5)
    if not expected.requires_grad:
        return
    found.sum().backward()
    expected.sum().backward()
    # The gradient has the logits' dtype.
    rounding = {torch.bfloat16: 2.0**-8, torch.float32: 1e-5}[dtype]
    assert (given.grad.double() - exact.grad).norm() <= rounding * exact.grad.norm()


@pytest.mark.parametrize("divergence", [losses.forward_kl, UNDER_AUTOCAST["kl_divergence"]])
def test_forward_kl_under_autocast_is_positive(
    divergence: Callable[[Tensor, Tensor], Tensor],
) -> None:
    drafted, target = sharp_logits(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert bool((divergence(drafted, target) > 0).all())


def test_forward_kl_of_nearly_equal_distributions_is_not_negative_and_has_its_gradient() -> None:
    """Its value is the difference of two rounded sums, whose error exceeds it here."""
    _, target = sharp_logits(torch.float32)
    drafted = (target + 1e-4 * torch.randn(target.shape)).requires_grad_()
    found = losses.forward_kl(drafted, target)
    assert bool((found >= 0).all())
    found.sum().backward()
    torch.testing.assert_close(drafted.grad, drafted.detach().softmax(-1) - target.softmax(-1))


def test_losses_do_not_end_the_autocast_around_them() -> None:
    drafted, target = sharp_logits(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        losses.forward_kl(drafted, target)
        assert (drafted @ target.T).dtype == torch.bfloat16


def test_cross_entropy_is_the_surprise_of_the_label() -> None:
    drafted, _ = logits()
    labels = torch.tensor([6, 0, 3, 3, 1])
    expected = -drafted.softmax(-1)[torch.arange(5), labels].log()
    torch.testing.assert_close(losses.cross_entropy(drafted, labels), expected)


def test_sum_over_chunks_equals_one_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.arange(10, dtype=torch.float64, requires_grad=True)
    seen = []

    def part(rows: Tensor) -> tuple[Tensor, Tensor]:
        seen.append(rows.shape[0])
        return (values[rows] ** 2).sum(), torch.tensor(rows.shape[0])

    monkeypatch.setattr(losses, "CHUNK_ELEMENTS", 12)
    total, count = losses.sum_over_rows(part, torch.tensor([1, 3, 4, 7, 8, 9, 2]), columns=4)
    assert seen == [3, 3, 1]
    total.backward()
    assert float(total) == 1 + 9 + 16 + 49 + 64 + 81 + 4
    assert int(count) == 7
    assert values.grad.tolist() == [0, 2, 4, 6, 8, 0, 0, 14, 16, 18]


@pytest.mark.parametrize("recompute", [True, False])
def test_chunks_that_only_other_processes_have_are_empty(recompute: bool) -> None:
    values = torch.arange(10, dtype=torch.float64, requires_grad=True)
    asked, seen = [], []

    def largest(count: int) -> int:
        asked.append(count)
        return 3

    def part(rows: Tensor) -> tuple[Tensor]:
        seen.append(rows.shape[0])
        return ((values[rows] ** 2).sum(),)

    with chunks.agreeing(largest):
        (total,) = losses.sum_over_rows(part, torch.tensor([1, 3]), 4, recompute)
    total.backward()
    assert (asked, float(total), values.grad[:4].tolist()) == ([1], 10, [0, 2, 0, 6])
    again = [0, 0, 2] if recompute else []  # in the backward pass: every process repeats them all
    assert seen == [2, 0, 0, *again]


@pytest.mark.parametrize(("gib", "power"), [(80, 28), (24, 26), (140, 28), (2, 25)])
def test_chunks_grow_with_a_gpus_memory(
    monkeypatch: pytest.MonkeyPatch, gib: int, power: int
) -> None:
    properties = SimpleNamespace(total_memory=gib << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert losses.chunk_elements(torch.device("cuda", 1)) == 1 << power
    assert losses.chunk_elements(torch.device("cpu")) == 1 << 25


def test_no_rows_make_a_zero_that_still_has_gradients() -> None:
    weight = torch.ones(3, requires_grad=True)
    (total,) = losses.sum_over_rows(
        lambda rows: (weight[rows].sum(),), torch.empty(0, dtype=torch.int64), columns=4
    )
    total.backward()
    assert float(total) == 0
    assert weight.grad.tolist() == [0, 0, 0]


def test_masked_entries_may_hold_anything() -> None:
    values = torch.tensor([[1.0, float("nan")], [2.0, 3.0]])
    mask = torch.tensor([[True, False], [True, True]])
    assert losses.masked_sum(values, mask).tolist() == [3, 3]
