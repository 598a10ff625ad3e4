"""What rules by probability share, on distributions written by hand."""

from __future__ import annotations

import torch

from inference.decoding.rules import weights
from inference.decoding.sampling.distribution import SamplingSettings
from inference.decoding.sampling.noise import SharedNoise


def test_a_row_without_weight_is_drawn_from_its_other_distribution_alone() -> None:
    """Rounding may leave one row of a batch without weights; the others keep theirs."""
    left = torch.tensor([[0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.3, 0.0], [0.5, 0.0, 0.0, 0.0]])
    instead = torch.tensor([[0.0, 0.0, 0.0, 1.0], [0.0, 1.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0]])
    seeds, roots = torch.tensor([5, 6, 7]), torch.tensor([2, 3, 4])
    noise = SharedNoise(SamplingSettings(temperature=1.0), seeds, 4, roots=roots)
    for position in range(8):
        drawn = weights.draw(left, instead, torch.full((3,), position), noise)
        assert drawn.tolist() == [3, 2, 0]
