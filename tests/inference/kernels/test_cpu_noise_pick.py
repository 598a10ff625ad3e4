"""The pick with noise in compiled steps: the C++ function against the reference, through inductor.

Legend: B rows, N nodes, V columns.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from heads.kernels.dispatch import traced_for_cpu
from inference.decoding.execution.inductor import compile_graph
from inference.kernels.reference.noise import NOISE_PICK, noise_pick
from tests.inference.kernels.test_cpu_tree_attention import threads

TEMPERATURE = 0.7
Inputs = tuple[Tensor, ...]


def compiled(inputs: Inputs) -> Any:
    """The operation for arguments of these shapes, compiled."""

    def call(logits: Tensor, positions: Tensor, seeds: Tensor, *ids: Tensor) -> tuple[Tensor]:
        return (NOISE_PICK(logits, positions, seeds, TEMPERATURE, *ids),)

    with torch.no_grad(), traced_for_cpu():
        graph = make_fx(call)(*inputs)
    names = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    assert names == ["headstart.noise_pick.default"]
    function = compile_graph(graph, inputs)
    return lambda *tensors: function(*tensors)[0]


def inputs(rows: int = 2, nodes: int = 3, columns: int = 515) -> Inputs:
    torch.manual_seed(rows * nodes)
    positions = torch.randint(0, 1 << 20, (rows, nodes))
    seeds = torch.randint(0, (1 << 63) - 1, (rows,))
    return torch.randn(rows, nodes, columns) * 2.0, positions, seeds


def test_equals_the_reference() -> None:
    given = inputs()
    pick = compiled(given)
    for scale in (0.0, 0.1, 1.0, 10.0, 1e4):
        for _ in range(40):
            logits = torch.randn_like(given[0]) * scale
            positions, seeds = given[1] + torch.randint(0, 99, given[1].shape), given[2] >> 1
            found = pick(logits, positions, seeds)
            assert torch.equal(found, noise_pick(logits, positions, seeds, TEMPERATURE))


def test_takes_the_tokens_that_columns_stand_for() -> None:
    logits, positions, seeds = inputs(columns=200)
    ids = torch.randperm(5000)[:200].sort().values
    found = compiled((logits, positions, seeds, ids))(logits, positions, seeds, ids)
    assert torch.equal(found, noise_pick(logits, positions, seeds, TEMPERATURE, ids))
    assert not torch.equal(found, noise_pick(logits, positions, seeds, TEMPERATURE))


@pytest.mark.parametrize("rows", [1, 40])
def test_many_columns_are_divided_among_threads(rows: int) -> None:
    given = inputs(rows=rows, nodes=2, columns=4096)
    with threads(2):
        assert torch.equal(compiled(given)(*given), noise_pick(*given, TEMPERATURE))


def test_infinite_and_missing_logits_are_the_references() -> None:
    given = inputs(columns=64)
    pick, infinite = compiled(given), float("inf")
    for column, value in ((63, infinite), (5, float("nan"))):
        logits = given[0].clone()
        logits[..., column] = value
        assert torch.equal(pick(logits, *given[1:]), torch.full_like(given[1], column))
    logits = torch.full_like(given[0], -infinite)
    assert torch.equal(pick(logits, *given[1:]), torch.zeros_like(given[1]))
    logits[..., 17] = 0.0
    assert torch.equal(pick(logits, *given[1:]), torch.full_like(given[1], 17))


def test_sampling_follows_the_distribution() -> None:
    columns, draws = 6, 20000
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -2.0, float("-inf")]).expand(1, draws, columns)
    given = (logits.contiguous(), torch.arange(draws)[None], torch.tensor([7]))
    found = compiled(given)(*given).flatten().bincount(minlength=columns) / draws
    expected = torch.softmax(logits[0, 0] / TEMPERATURE, 0)
    assert float((found - expected).abs().max()) < 0.012
