"""Objectives and depth weights of block drafters by their formulas."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from heads.api.errors import UserError
from heads.kernels.reference.row_losses import ROW_LOSSES
from heads.nn.block.losses import Objective, Weighting, by_row_and_depth, d_pace


@pytest.mark.parametrize("smoothing", [0.0, 0.5, 1.0])
def test_d_pace_is_the_gradient_of_the_expected_accepted_length(smoothing: float) -> None:
    """Of the smoothed confidences, in their logarithms."""
    right = torch.log(
        torch.rand(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    )
    valid = torch.ones(4, 5, dtype=torch.bool)
    valid[1, 3:] = False
    valid[2, 1] = False  # what lies behind a gap is never reached
    leaves = ((1 - smoothing) * right.exp() + smoothing).log().requires_grad_()
    length = torch.zeros((), dtype=torch.float64)
    for block in range(4):
        product = torch.ones((), dtype=torch.float64)
        for depth in range(5):
            if not valid[block, depth]:
                break
            product = product * leaves[block, depth].exp()
            length = length + product
    (expected,) = torch.autograd.grad(length, leaves)
    torch.testing.assert_close(d_pace(right, valid, smoothing), expected)
    assert not d_pace(leaves, valid, smoothing).requires_grad


def test_d_pace_spelt_out() -> None:
    weights = d_pace(
        torch.log(torch.tensor([[0.5, 0.8, 0.25]])), torch.ones(1, 3, dtype=torch.bool), 0.0
    )
    torch.testing.assert_close(weights, torch.tensor([[0.5 + 0.4 + 0.1, 0.4 + 0.1, 0.1]]))
    smoothed = Weighting("d_pace", 0.0, 4)(
        torch.log(torch.tensor([[0.5, 0.0]])), torch.ones(1, 2, dtype=torch.bool)
    )
    torch.testing.assert_close(smoothed, torch.tensor([[0.75 + 0.375, 0.375]]))


@pytest.mark.parametrize(("size", "gamma"), [(16, 7.0), (10, 5.0), (7, 4.0)])
def test_exponential_weights_have_the_published_decay(size: int, gamma: float) -> None:
    weights = Weighting("exponential", 0.0, size)(
        torch.zeros(1, 6), torch.ones(1, 6, dtype=torch.bool)
    )
    assert weights[0].tolist() == pytest.approx([math.exp(-k / gamma) for k in range(6)])
    given = Weighting("exponential", 2.0, size)(
        torch.zeros(1, 3), torch.ones(1, 3, dtype=torch.bool)
    )
    assert given[0].tolist() == pytest.approx([1.0, math.exp(-0.5), math.exp(-1.0)])


def test_uniform_weights_are_ones() -> None:
    assert Weighting("uniform", 0.0, 8)(
        torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)
    ).unique().tolist() == [1.0]


def test_a_mix_is_the_weighted_sum_of_its_parts() -> None:
    """Annealed by the mean acceptance of a row's blocks at a depth, of whatever number."""
    generator = torch.Generator().manual_seed(0)
    logits, target = torch.randn(2, 6, 9, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 9, (6,), generator=generator)
    q, p = logits.softmax(-1), target.softmax(-1)
    alpha = torch.minimum(p, q).sum(-1)
    kl, tv = (p * (p / q).log()).sum(-1), 1 - alpha
    plain = 0.5 * -q[range(6), labels].log() + 2 * kl + 3 * tv - 0.7 * alpha.log()
    # two rows of two blocks of two depths, of which two are not supervised
    block, depth = torch.tensor([[0, 0], [0, 1], [1, 0], [2, 0], [3, 0], [3, 1]]).T
    places = [[[0, 2], [1]], [[3, 4], [5]]]

    def summed(items: Tensor) -> Tensor:
        return by_row_and_depth(items, block, depth, (2, 2, 2))

    for weight in (0.2, 0.0):
        objective = Objective(0.5, 2.0, 3.0, 0.7, weight)
        rows = ROW_LOSSES(logits, target, labels, objective.names)
        counts = summed(torch.ones_like(block))
        assert counts.tolist() == [[2, 1], [2, 1]]
        found = objective.mixed(summed(objective.ends(rows)), summed(tv), counts)
        shares = [[torch.exp(-3.0 * alpha[at].mean()) for at in row] for row in places]
        expected = [
            [
                (plain + weight * (share * kl + (1 - share) * tv))[at].sum()
                for at, share in zip(row, own, strict=True)
            ]
            for row, own in zip(places, shares, strict=True)
        ]
        torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))


def test_accuracy_is_measured_against_what_weighs_more() -> None:
    labels, target = torch.tensor([3, 3]), torch.tensor([0.0, 5.0, 0.0, 0.0]).expand(2, -1)
    found = ROW_LOSSES(torch.eye(4)[[3, 1]], target)  # the label's token, and the target's
    alone = ROW_LOSSES(torch.eye(4)[[3, 1]])
    assert Objective(1.0, 0.0, 0.5, 0.0, 0.0).hits(found, labels).tolist() == [True, False]
    assert Objective(0.1, 0.0, 1.8, 0.0, 0.0).hits(found, labels).tolist() == [False, True]
    assert Objective(1.0, 0.0, 0.0, 0.0, 0.0).hits(alone, labels).tolist() == [True, False]


def test_no_objective_at_all_is_refused() -> None:
    with pytest.raises(UserError, match="positive weight"):
        Objective(0.0, 0.0, 0.0, 0.0, 0.0)
    with pytest.raises(UserError, match="Did you mean 'uniform'"):
        Weighting("unifrom", 0.0, 8)
