"""The counter of launches against operations that a person can count, and what layers have."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import Qwen3Config

from heads.api.tree import TokenTree
from inference.kernels.reference.commit import ACCEPT_WALK
from scripts.evidence.acceptance.shapes import LLAMA, TOY
from scripts.evidence.launches import Launches, StepModel, compiled_layer, count, target_bytes


def test_views_and_allocations_launch_nothing_and_a_kernel_of_ours_once() -> None:
    x, launches = torch.randn(4, 6), Launches()
    launches.phase = "step"
    with launches, launches.kernels():
        y = x.transpose(0, 1)[1:].reshape(5, 4) + 1  # a copy would be one more: views until here
        z = torch.empty(3)
        y.mul_(2)
        y @ torch.ones(4, 2)
        ACCEPT_WALK(torch.zeros(1, 3).long(), torch.zeros(1, 3).long(), TokenTree.chain(2))
    assert z.shape == (3,)
    # add, mul, ones, matmul; then two zeros with a cast each, and the walk; the chain's own tensors
    before = launches.counts["step"]
    with launches, launches.kernels():
        tokens, picks, tree = torch.zeros(1, 3).long(), torch.zeros(1, 3).long(), TokenTree.chain(2)
    made = launches.counts["step"] - before
    assert before == 4 + made + 1
    assert tokens.shape == picks.shape and tree.num_nodes == 3


def test_the_model_adds_reading_and_launching() -> None:
    model = StepModel(bandwidth=1e9, products=0.5, launch_seconds=1e-3)
    assert model.milliseconds(5e6, 10, 10) == pytest.approx(10.0)
    assert model.milliseconds(5e6, 10, 14) == pytest.approx(14.0)
    # Llama-3.1-8B has 8.03 billion weights, of which the embedding is looked up
    assert target_bytes(LLAMA) == pytest.approx(2 * (8.03e9 - 128_256 * 4096), rel=0.001)


@pytest.mark.slow
def test_a_compiled_layer_takes_twelve_launches() -> None:
    """Of both families; and their plain layers four and five times as many."""
    qwen = replace(TOY, family=Qwen3Config)
    assert compiled_layer(replace(TOY, layers=2)) == compiled_layer(replace(qwen, layers=2)) == 12
    llama = count("llama31_8b", LLAMA, TOY)
    assert 40 <= llama["layer"] <= 50
    assert llama["layer_compiled"] == 12
    assert llama["ideal_ms"] < llama["plain_ms"][1] < llama["plain_ms"][0] < llama["eagle3_ms"][0]
