"""Muon: what it does to a matrix, which weights it takes, and its division among processes."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from heads.nn.matrices import matrices, set_matrix
from train import muon
from train.muon import MuonAdamW, divide, orthogonalise
from train.optim import OptimConfig, make_optimizer


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("shape", [(8, 8), (5, 20), (20, 5), (3, 6, 4)])
def test_singular_values_are_near_one_and_vectors_stay(
    shape: tuple[int, ...], fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also on a CPU that emulates bfloat16."""
    monkeypatch.setattr(muon, "multiplies_bfloat16", lambda: fast)
    torch.manual_seed(0)
    matrix = torch.randn(shape)
    turned = orthogonalise(matrix)
    assert turned.dtype == (torch.bfloat16 if fast else torch.float32)
    turned = turned.float()
    left, sizes, right = torch.linalg.svd(matrix, full_matrices=False)
    assert ((torch.linalg.svdvals(turned) - 1).abs()[sizes > 0.2] < 0.4).all()
    expected = left @ right
    assert torch.cosine_similarity(turned.flatten(), expected.flatten(), dim=0) > 0.95


def test_a_stack_is_turned_matrix_by_matrix() -> None:
    torch.manual_seed(0)
    stack = torch.randn(2, 3, 6, 4)
    alone = torch.stack([orthogonalise(matrix) for matrix in stack.flatten(0, 1)])
    assert torch.allclose(orthogonalise(stack).flatten(0, 1).float(), alone.float(), atol=2e-2)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.linear = nn.Embedding(9, 4), nn.Linear(4, 4)
        self.lm_head, self.stack = nn.Linear(4, 9), nn.Parameter(torch.ones(2, 4, 4))
        self.mix = nn.Parameter(torch.ones(3, 2))
        set_matrix(self.lm_head.weight, False)
        set_matrix(self.stack, True)


def test_matrices_are_linear_layers_and_what_is_said_to_be() -> None:
    model = Model()
    assert {id(weight) for weight in matrices(model)} == {id(model.linear.weight), id(model.stack)}
    groups = make_optimizer(model, OptimConfig(kind="muon", weight_decay=0.1)).param_groups
    found = [(group["muon"], group["weight_decay"], len(group["params"])) for group in groups]
    assert found == [(True, 0.1, 2), (False, 0.1, 3), (False, 0.0, 2)]
    assert isinstance(make_optimizer(model, OptimConfig()), torch.optim.AdamW)


@settings(deadline=None, max_examples=30)
@given(
    st.lists(st.sampled_from([(3, 5), (2, 2), (4, 4), (2, 3, 3)]), min_size=1, max_size=6),
    st.integers(1, 5),
)
def test_divided_matrices_are_updated_as_whole_ones(
    shapes: list[tuple[int, ...]], processes: int
) -> None:
    torch.manual_seed(0)
    whole = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    gradients = [torch.randn(shape) for shape in shapes]
    count = sum(weight.numel() for weight in whole)
    size = -(-count // processes)
    padding = torch.zeros(processes * size - count)

    def flat(tensors: list[Tensor]) -> list[Tensor]:
        joined = torch.cat([*(tensor.detach().flatten() for tensor in tensors), padding])
        return list(joined.clone().split(size))

    def optimiser(weights: list[nn.Parameter]) -> MuonAdamW:
        group = {"params": weights, "muon": True, "weight_decay": 0.1}
        return MuonAdamW([group], 0.1, 0.9, (0.9, 0.95), 1e-8)

    parts = [nn.Parameter(part) for part in flat(whole)]
    barrier, held = threading.Barrier(processes, timeout=30), [torch.empty(0)] * processes

    def run(rank: int) -> None:
        def add(part: Tensor) -> Tensor:
            held[rank] = part.clone()
            barrier.wait()
            total = torch.stack(held).sum(0)
            barrier.wait()
            return total

        parts[rank].grad = flat(gradients)[rank]
        own = optimiser([parts[rank]])
        own.hold([divide(shapes, size, rank)], add)
        for _ in range(2):
            own.step()

    with ThreadPoolExecutor(processes) as pool:
        list(pool.map(run, range(processes)))
    for weight, gradient in zip(whole, gradients, strict=True):
        weight.grad = gradient
    together = optimiser(whole)
    for _ in range(2):
        together.step()
    found = torch.cat([part.detach() for part in parts])
    assert torch.allclose(found, torch.cat(flat(list(whole))), atol=1e-6)
