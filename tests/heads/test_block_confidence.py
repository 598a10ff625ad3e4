"""Confidence of drafts and its calibration, on chains whose true chances are known."""

from __future__ import annotations

import pytest
import torch

from heads.api.errors import UserError
from heads.nn.block.confidence import (
    ConfidenceHead,
    calibration_error,
    calibration_errors,
    confidence_loss,
    fit_temperatures,
    survival,
)


def recorded(temperatures: list[float], chains: int = 20_000) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-odds that are too extreme (or too timid) by these factors, and how many drafts of each
    chain were accepted."""
    generator = torch.Generator().manual_seed(0)
    said = 2.0 * torch.randn(chains, len(temperatures), generator=generator) + 0.5
    chances = (said / torch.tensor(temperatures)).sigmoid()
    kept = torch.rand(chains, len(temperatures), generator=generator) < chances
    return said, kept.long().cumprod(1).sum(1)


def test_the_temperatures_that_made_the_records_are_found() -> None:
    true = [2.0, 0.5, 1.0]
    odds, accepted = recorded(true)
    fitted = fit_temperatures(odds, accepted)
    assert fitted.tolist() == pytest.approx(true, rel=0.15)
    before = calibration_errors(odds, accepted, torch.ones(3))
    after = calibration_errors(odds, accepted, fitted)
    assert before[0] > 0.04 and max(after) < 0.015
    assert (
        all(late < early + 0.003 for early, late in zip(before, after, strict=True))
        and sum(after) < sum(before) / 2
    )


def test_calibration_error_is_the_mean_gap_of_the_bins() -> None:
    chances = torch.tensor([0.05, 0.05, 0.95, 0.95])
    assert calibration_error(chances, torch.tensor([0.0, 0.0, 1.0, 1.0])) == pytest.approx(0.05)
    assert calibration_error(chances, torch.tensor([1.0, 0.0, 1.0, 0.0])) == pytest.approx(0.45)
    assert calibration_error(torch.tensor([1.0]), torch.tensor([1.0])) == 0.0


def test_survival_is_the_product_of_confidences() -> None:
    odds, temperatures = torch.tensor([[0.3, -1.0, 2.0]]), torch.tensor([1.0, 2.0, 0.5])
    expected = (odds / temperatures).sigmoid().cumprod(1).double()
    torch.testing.assert_close(survival(odds, temperatures), expected, rtol=1e-6, atol=1e-6)


def test_the_loss_is_least_at_the_chance_of_acceptance() -> None:
    chance = torch.tensor([0.3], dtype=torch.float64)
    odds = torch.logit(chance).requires_grad_()
    (slope,) = torch.autograd.grad(confidence_loss(odds, chance).sum(), odds)
    assert abs(float(slope)) < 1e-12
    assert confidence_loss(odds + 1, chance) > confidence_loss(odds, chance)


def test_what_the_head_says_is_tempered_by_depth() -> None:
    head = ConfidenceHead(4, 3)
    head.temperatures.copy_(torch.tensor([1.0, 2.0, 4.0]))
    odds = torch.tensor([[1.0, 1.0]])
    found = head.calibrated(odds, torch.tensor([[2, 3]]))
    torch.testing.assert_close(found, torch.tensor([[0.5, 0.25]]).sigmoid())


def test_nothing_recorded_is_refused() -> None:
    with pytest.raises(UserError, match="needs recorded drafts"):
        fit_temperatures(torch.zeros(0, 3), torch.zeros(0))
