"""Filters without sorting: the kernel and the reference against a loop that a person can read."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from inference.decoding.sampling.distribution import SamplingSettings, shape_logits
from inference.kernels.reference import filters as reference_filters
from inference.kernels.reference.filters import FILTER_LOGITS
from tests.heads.kernels.devices import DEVICES

CASES = {
    "none": (10**9, 1.0, 0.0),
    "top_k": (7, 1.0, 0.0),
    "one": (1, 1.0, 0.0),
    "top_p": (10**9, 0.83, 0.0),
    "little": (10**9, 1e-6, 0.0),
    "min_p": (10**9, 1.0, 0.07),
    "all": (20, 0.9, 0.01),
    "p of few": (3, 0.5, 0.0),
}


def slow(logits: list[float], k: int, p: float, min_p: float) -> list[bool]:
    """Which tokens stay, token by token in double precision."""
    stays = [sum(other > own for other in logits) < k for own in logits]
    best = max(logits)
    mass = [math.exp(x - best) if kept else 0.0 for x, kept in zip(logits, stays, strict=True)]
    total = sum(mass)
    if p < 1:
        for place, own in enumerate(logits):
            better = sum(m for m, x in zip(mass, logits, strict=True) if x > own)
            stays[place] = stays[place] and (better < p * total or own == best)
    return [kept and math.exp(x - best) >= min_p for kept, x in zip(stays, logits, strict=True)]


def logits(vocab: int, ties: bool) -> Tensor:
    """Two rows of three positions; with ties, of few different values."""
    drawn = 2 * torch.randn(2, 3, vocab, generator=torch.Generator().manual_seed(vocab))
    if ties:
        drawn = drawn.round()
    drawn[0, 1, 3] = float("-inf")
    drawn[1, 2, :5] = torch.tensor([0.0, -0.0, 0.0, -1.0, -0.0])
    return drawn


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("vocab", [33, 300])
def test_what_stays_is_what_the_loop_keeps(device: str, vocab: int, ties: bool) -> None:
    given = logits(vocab, ties)
    names = list(CASES)
    for first, second in zip(names, names[1:] + names[:1], strict=True):
        settings = [CASES[first], CASES[second]]
        wanted = torch.tensor(
            [[slow(row.tolist(), *settings[n]) for row in given[n].double()] for n in range(2)]
        )
        k = torch.tensor([item[0] for item in settings])
        p = torch.tensor([item[1] for item in settings])
        floor = torch.tensor([math.log(m) if m else -math.inf for *_, m in settings])
        on_device = [part.to(device) for part in (given, k, p, floor)]
        for filtered in (reference_filters.filter_logits, FILTER_LOGITS.triton()):
            found = filtered(*on_device).cpu()
            finite = given.isfinite()
            assert torch.equal(found.isfinite(), wanted & finite), (first, second)
            kept = found.isfinite()
            assert torch.equal(found[kept], given[kept])


@pytest.mark.parametrize("device", DEVICES)
def test_a_position_is_filtered_alike_alone_and_among_others(device: str) -> None:
    given = logits(300, False).to(device)
    settings = [torch.tensor([value], device=device) for value in (50, 0.9, -4.0)]
    whole = FILTER_LOGITS.triton()(given[:1], *settings)
    for place in range(3):
        alone = FILTER_LOGITS.triton()(given[:1, place : place + 1], *settings)
        assert torch.equal(alone[:, 0], whole[:, place])


def test_the_same_settings_for_all_are_those_of_every_row() -> None:
    given = logits(300, True)
    for top_k, top_p, min_p in CASES.values():
        settings = SamplingSettings(1.0, top_k % 10**9, top_p, min_p)
        floor = math.log(min_p) if min_p else -math.inf
        rows = torch.tensor([top_k] * 2), torch.tensor([top_p] * 2), torch.tensor([floor] * 2)
        assert torch.equal(
            shape_logits(given, settings), reference_filters.filter_logits(given, *rows)
        )
