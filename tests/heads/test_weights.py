"""Weights of tokens and of drafts' roots, for every recipe that is trained: each loss is the sum
that it says it is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from heads.api.batch import TrainBatch
from heads.nn.anchors import draw, inclusion
from tests.heads.explicit import PAIR
from tests.heads.micro import micro_target, packed_batch
from tests.heads.recipes import TRAINED, build

ALL_PREDICTIONS = [
    "distilled",
    "eagle",
    "eagle3",
    "fastmtp",
    "hass",
    "hydra_heads",
    "kangaroo",
    "medusa",
    "mtp",
]
"""Recipes whose loss looks at every supervised token, whatever else is supervised."""
BLOCKS = ["dflash", "dspark", "domino"]


def prepared(name: str) -> tuple[Any, TrainBatch]:
    target = micro_target()
    everywhere = {"num_anchors": 1000} if name in BLOCKS else {}
    drafter = build(name, target, changes=everywhere)
    return drafter, packed_batch(target, drafter.needs, [PAIR, PAIR[::-1]])


def loss(drafter: Any, batch: TrainBatch, **changed: Tensor) -> Tensor:
    found: Tensor = drafter.loss(replace(batch, **changed)).loss_sum
    return found.detach()


def ones(batch: TrainBatch) -> Tensor:
    return torch.ones(batch.tokens.shape, dtype=torch.float32)


@pytest.mark.parametrize("name", TRAINED)
def test_weights_of_one_change_no_bit(name: str) -> None:
    drafter, batch = prepared(name)
    assert torch.equal(
        loss(drafter, batch), loss(drafter, batch, weights=ones(batch), anchors=ones(batch))
    )


@pytest.mark.parametrize("name", TRAINED)
def test_a_token_of_weight_two_counts_twice(name: str) -> None:
    drafter, batch = prepared(name)
    # kinds with a draft vocabulary have no loss where the target's word is outside
    for place in range(3, 12):
        at, alone = (0, place), torch.zeros_like(ones(batch))
        alone[at] = 1.0
        own = loss(drafter, batch, weights=alone)
        if own.abs() > 0:
            break
    assert own.abs() > 0, "no token has a loss"
    double, none = ones(batch), ones(batch)
    double[at], none[at] = 2.0, 0.0
    plain = loss(drafter, batch)
    torch.testing.assert_close(loss(drafter, batch, weights=double), plain + own)
    torch.testing.assert_close(loss(drafter, batch, weights=none), plain - own)


@pytest.mark.parametrize("name", ALL_PREDICTIONS)
def test_a_token_of_weight_zero_is_as_if_nobody_supervised_it(name: str) -> None:
    drafter, batch = prepared(name)
    mask, weights = batch.loss_mask.clone(), ones(batch)
    for at in ((0, 6), (1, 3), (1, 20)):
        mask[at], weights[at] = False, 0.0
    torch.testing.assert_close(
        loss(drafter, batch, weights=weights), loss(drafter, batch, loss_mask=mask)
    )


@pytest.mark.parametrize("name", [*ALL_PREDICTIONS, *BLOCKS])
def test_the_drafts_of_all_roots_are_the_whole_loss(name: str) -> None:
    """With as many blocks as places nothing is drawn, so that the roots' parts add up exactly."""
    drafter, batch = prepared(name)
    total = torch.zeros((), dtype=torch.float64)
    for row in range(2):
        for place in range(batch.tokens.shape[1]):
            alone = torch.zeros_like(ones(batch))
            alone[row, place] = 1.0
            total += loss(drafter, batch, anchors=alone).double()
    torch.testing.assert_close(total, loss(drafter, batch).double())


def test_a_root_weighs_all_depths_of_its_own_draft() -> None:
    """A chain of two steps: the draft of the root at place 4 predicts the tokens at 5 and 6, and
    nothing else."""
    drafter, batch = prepared("hass")
    root = torch.zeros_like(ones(batch))
    root[0, 4] = 1.0
    own = loss(drafter, batch, anchors=root)
    parts = [torch.zeros_like(root), torch.zeros_like(root)]
    parts[0][0, 5], parts[1][0, 6] = 1.0, 1.0
    found = torch.stack([loss(drafter, batch, anchors=root, weights=part) for part in parts])
    torch.testing.assert_close(own, found.sum())
    assert (found > 0).all()


@pytest.mark.parametrize("most", [3, 8, 40])
def test_drawn_places_estimate_the_weighted_sum(most: int) -> None:
    generator = torch.Generator().manual_seed(3)
    weights = torch.rand(20, generator=generator) ** 2
    weights[4] = 0.0
    values = torch.randn(20, generator=generator)
    found, often = torch.zeros(()), torch.zeros(20)
    for _ in range(3000):
        order, scale = draw(20, most, generator, weights)
        assert order.tolist() == sorted(set(order.tolist())) and len(order) == min(most, 19)
        found += (values[order] * scale).sum()
        often[order] += 1
    chances = inclusion(weights.double(), most)
    torch.testing.assert_close(often / 3000, chances.float(), atol=0.05, rtol=0.0)
    assert often[4] == 0
    assert abs(float(found / 3000 - (values * weights).sum())) < 0.3
    if most >= 20:
        torch.testing.assert_close(found / 3000, (values * weights).sum(), rtol=1e-3, atol=1e-3)
