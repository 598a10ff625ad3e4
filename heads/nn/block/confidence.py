"""A drafter's own estimate that a draft will be accepted, and its calibration.

The head (DSpark, 2607.05147) reads a slot's state and, if the drafter has a table of tokens, the
parent's row; it is trained on 1 - TV(p, q), the chance of acceptance under the rule. Its output is
then calibrated on recorded drafts by sequential temperature scaling: depth by depth, a temperature
is fitted such that the PRODUCT of the confidences up to there, the chance that a chain survives so
far, matches the recorded acceptance. Schedulers rank drafts by that product.

Legend: M recorded chains, K depths, H hidden, r rank, `...` any.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from heads.api.errors import UserError
from heads.nn import init
from heads.nn.losses import full_precision, widen

COOLEST, HOTTEST, STEPS = 0.2, 5.0, 65
"""Temperatures that calibration tries: from, to, how many (evenly on a logarithmic scale)."""
BINS = 10
"""Bins of chances that a calibration error compares."""


class ConfidenceHead(nn.Module):
    """A linear unit over [h_k; W1[x_{k-1}]], and a temperature per depth (1 at first)."""

    temperatures: Tensor

    def __init__(self, width: int, depths: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, 1)
        self.register_buffer("temperatures", torch.ones(depths))

    def initialise(self, generator: torch.Generator) -> None:
        """Small weights, and equal odds."""
        init.normal(self.proj.weight, 0.1 * self.proj.in_features**-0.5, generator)
        init.constant(self.proj.bias, 0.0)

    def forward(self, states: Tensor, hint: Tensor | None) -> Tensor:
        """States [..., H], hints [..., r] -> log-odds of acceptance [...], uncalibrated."""
        both = states if hint is None else torch.cat([states, hint.to(states.dtype)], -1)
        return cast(Tensor, self.proj(both)[..., 0])

    def calibrated(self, log_odds: Tensor, depth: Tensor) -> Tensor:
        """Confidence float32 [...] of drafts at `depth` [...] int64 (1-based)."""
        return (log_odds.float() / self.temperatures[depth - 1].float()).sigmoid()


@full_precision
def confidence_loss(log_odds: Tensor, acceptance: Tensor) -> Tensor:
    """Binary cross entropy [R] of log-odds [R] against fixed chances of acceptance [R]."""
    log_odds = widen(log_odds)
    wanted = acceptance.detach().to(log_odds).clamp(0, 1)
    return F.binary_cross_entropy_with_logits(log_odds, wanted, reduction="none")


def survival(log_odds: Tensor, temperatures: Tensor) -> Tensor:
    """Chance [M, K] that the first k drafts pass: log-odds [M, K], temperatures [K]."""
    return F.logsigmoid(log_odds.double() / temperatures.double()).cumsum(1).exp()


def fit_temperatures(log_odds: Tensor, accepted: Tensor) -> Tensor:
    """Sequential temperature scaling: log_odds [M, K] as recorded, accepted [M] int64 drafts of
    each chain that were accepted -> temperatures [K] float32.

    Depth k's temperature is the one with which the survival up to k explains the outcomes best
    (least binary cross entropy), given the temperatures before it. A choice by the calibration
    error itself followed the noise of a few hundred chains (docs/log.md). Raises `UserError`
    without records.
    """
    if log_odds.shape[0] == 0:
        raise UserError(
            "calibration needs recorded drafts; given none. Draft for a few prompts first."
        )
    first, last = (torch.tensor(end).log10().item() for end in (COOLEST, HOTTEST))
    tried = torch.logspace(first, last, STEPS, dtype=torch.float64)
    settled = torch.ones(log_odds.shape[0], dtype=torch.float64)
    temperatures = []
    for depth in range(log_odds.shape[1]):
        outcome = (accepted.cpu() > depth).double()
        # [tried, M]
        chances = settled * (log_odds[:, depth].cpu().double() / tried[:, None]).sigmoid()
        safe = chances.clamp(1e-9, 1 - 1e-9)
        errors = [float(F.binary_cross_entropy(chance, outcome)) for chance in safe]
        best = min(range(STEPS), key=lambda i: (errors[i], abs(i - STEPS // 2)))
        temperatures.append(float(tried[best]))
        settled = chances[best]
    return torch.tensor(temperatures, dtype=torch.float32)


def calibration_error(chances: Tensor, outcomes: Tensor) -> float:
    """Expected calibration error of chances [M] in [0, 1] against outcomes [M] of 0 and 1: the mean
    gap between predicted and observed rate over `BINS` of equal width, weighted by their share.
    """
    place = (chances * BINS).long().clamp(0, BINS - 1)
    said = torch.zeros(BINS, dtype=torch.float64).index_add_(0, place, chances.double())
    seen = torch.zeros(BINS, dtype=torch.float64).index_add_(0, place, outcomes.double())
    return float((said - seen).abs().sum() / max(1, chances.shape[0]))


def calibration_errors(
    log_odds: Tensor, accepted: Tensor, temperatures: Tensor | Sequence[float]
) -> list[float]:
    """`calibration_error` of the survival up to each depth [K]."""
    chances = survival(log_odds, torch.as_tensor(temperatures))
    columns = enumerate(chances.unbind(1))
    return [calibration_error(chance, (accepted > depth).double()) for depth, chance in columns]
