"""The streams of noise beside the target's: independent of each other and from pass to pass, and
never touching the target's.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from inference.decoding.sampling.distribution import SamplingSettings
from inference.decoding.sampling.noise import SharedNoise, Stream, stream_seeds
from tests.inference.decoding.rules.toys import CLEAR

ROWS = 40_000
SEEDS = torch.arange(ROWS)


def noise(root: int | None) -> SharedNoise:
    roots = None if root is None else torch.full((ROWS,), root)
    return SharedNoise(SamplingSettings(1.0), SEEDS, 8, Stream.DRAFT, True, roots)


def draws(root: int | None, stream: Stream, position: int = 9) -> Tensor:
    """One draw out of eight per row."""
    return noise(root).gumbel(torch.full((ROWS, 1), position), stream=stream)[:, 0].argmax(-1)


def independence(one: Tensor, other: Tensor) -> float:
    """p value of the pairs being spread evenly over 64 cells."""
    counts = torch.bincount(one * 8 + other, minlength=64).double()
    chi = ((counts - ROWS / 64) ** 2 / (ROWS / 64)).sum()
    return float(torch.special.gammaincc(torch.tensor(63 / 2, dtype=torch.float64), chi / 2))


@pytest.mark.parametrize("stream", [Stream.DRAFT, Stream.COIN, Stream.RESIDUAL])
def test_passes_draw_independently_at_the_same_position(stream: Stream) -> None:
    for root, later in ((3, 4), (5, 7), (0, 8), (1_000_000, 1_000_001)):
        assert independence(draws(root, stream), draws(later, stream)) > 1e-4
    assert independence(draws(3, stream), draws(None, stream)) > 1e-4
    assert independence(draws(3, stream), draws(3, stream)) < CLEAR  # the control


def test_streams_draw_independently_of_each_other() -> None:
    streams = list(Stream)
    for place, one in enumerate(streams):
        for other in streams[place + 1 :]:
            assert independence(draws(3, one), draws(3, other)) > 1e-4
            assert independence(draws(3, one), draws(4, other)) > 1e-4


def test_the_targets_noise_does_not_know_about_passes() -> None:
    """The text of `match`, and of plain decoding, must not depend on where passes began."""
    assert torch.equal(draws(3, Stream.TARGET), draws(4, Stream.TARGET))
    assert torch.equal(stream_seeds(SEEDS, Stream.TARGET, SEEDS), SEEDS)


def test_seeds_of_streams_are_valid_and_differ() -> None:
    """Non-negative 63-bit numbers, also for the largest seed; all different over roots and
    streams."""
    roots = torch.arange(5_000)
    for seed in (0, 123_456_789_012_345, (1 << 63) - 1):
        seeds = torch.full_like(roots, seed)
        found = torch.cat([stream_seeds(seeds, stream, roots) for stream in list(Stream)[1:]])
        assert int(found.min()) >= 0 and len(found.unique()) == len(found)


def test_the_loop_moves_the_root_in_place() -> None:
    roots = torch.full((ROWS,), 3)
    moving = SharedNoise(SamplingSettings(1.0), SEEDS, 8, Stream.DRAFT, True, roots)
    positions = torch.full((ROWS, 1), 9)
    assert torch.equal(moving.uniforms(positions, 2), noise(3).uniforms(positions, 2))
    roots += 4
    assert torch.equal(moving.uniforms(positions, 2), noise(7).uniforms(positions, 2))
    logits = torch.zeros(ROWS, 1, 8)
    assert torch.equal(moving.pick(logits, positions), noise(7).pick(logits, positions))


def test_coins_are_uniform_and_never_0_or_1() -> None:
    coins = noise(3).uniforms(torch.full((ROWS, 1), 9), 3)
    assert coins.dtype == torch.float64 and float(coins.min()) > 0 and float(coins.max()) < 1
    for column in coins[:, 0].unbind(1):
        counts = torch.bincount((column * 64).long(), minlength=64).double()
        # 63 degrees of freedom: 1e-6
        assert float(((counts - ROWS / 64) ** 2 / (ROWS / 64)).sum()) < 135
    assert abs(float(torch.corrcoef(coins[:, 0].T)[0, 1])) < 0.025


def test_logits_are_kept_for_nobody_at_temperature_0() -> None:
    assert not SharedNoise(SamplingSettings(0.0), SEEDS, 8, Stream.DRAFT, True, SEEDS).keeps_logits
    assert noise(3).keeps_logits
