"""The product whose rows do not know of one another: right, and bit for bit the same for every
number of rows. Nothing else of a pass may depend on it: the attention kernel's invariant launch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from heads.api.tree import TokenTree
from inference.kernels.reference.attention import TREE_ATTENTION
from inference.kernels.reference.row_linear import ROW_LINEAR, TILE, InTiles, row_linear
from tests.heads.kernels.devices import DEVICES
from tests.inference.kernels.interpreted import products_with_equal_rows


@pytest.fixture(autouse=True)
def equal_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    products_with_equal_rows(monkeypatch)


WIDTHS = [*range(1, 18), 31, 32, 33, 48, 63, 64]


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("inputs", "outputs"), [(300, 70), (1100, 33), (64, 128)])
def test_rows_have_the_same_bits_for_every_width(
    device: str, dtype: torch.dtype, inputs: int, outputs: int
) -> None:
    rows, weight = draw(64, inputs, dtype=dtype), draw(outputs, inputs, seed=1, dtype=dtype)
    bias = draw(outputs, seed=2, dtype=dtype)
    rows, weight, bias = rows.to(device), weight.to(device), bias.to(device)
    kernel = ROW_LINEAR.triton()
    whole = kernel(rows, weight, bias)
    for width in WIDTHS:
        assert torch.equal(kernel(rows[:width], weight, bias), whole[:width]), width
    shuffled = torch.randperm(64, generator=torch.Generator().manual_seed(3)).to(device)
    assert torch.equal(kernel(rows[shuffled], weight, bias), whole[shuffled])
    wanted = F.linear(rows.double(), weight.double(), bias.double())
    gap = (whole.double() - wanted).abs().max() / wanted.abs().max()
    assert gap < (1e-5 if dtype == torch.float32 else 1e-2)
    assert torch.equal(kernel(rows, weight), kernel(rows, weight, torch.zeros_like(bias)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("inputs", "outputs"), [(300, 70), (1100, 33), (64, 128)])
def test_the_references_rows_have_the_same_bits_too(
    dtype: torch.dtype, inputs: int, outputs: int
) -> None:
    rows, weight = draw(64, inputs, dtype=dtype), draw(outputs, inputs, seed=1, dtype=dtype)
    whole = row_linear(rows, weight)
    for width in WIDTHS:
        assert torch.equal(row_linear(rows[:width], weight), whole[:width]), width
    shuffled = torch.randperm(64, generator=torch.Generator().manual_seed(3))
    assert torch.equal(row_linear(rows[shuffled], weight), whole[shuffled])


@pytest.mark.parametrize("alike", [True, False])
def test_rows_that_are_not_alike_are_computed_alone(alike: bool) -> None:
    """A library whose fourth row of a tile rounds otherwise is given one row at a time."""
    seen = []

    def library(rows: Tensor) -> Tensor:
        seen.append(len(rows))
        out = 2 * rows
        if not alike:
            out[3:4] += 1e-3
        return out

    given = draw(19, 5)
    assert torch.equal(InTiles(library)(given), 2 * given)
    tiles = [TILE] * 3 if alike else [1] * 19
    assert seen[-len(tiles) :] == tiles


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("limits", [{}, {"window": 40}])
def test_a_node_of_a_chain_has_the_bits_of_the_same_token_alone(
    device: str, dtype: torch.dtype, limits: dict[str, int]
) -> None:
    """Node i of a chain behind L tokens against a lone node behind L + i, with one launch for all
    numbers of nodes; alone and among other rows."""
    heads, groups, size, capacity, length, nodes = 2, 4, 16, 160, 90, 40
    query = draw(1, heads * groups, nodes, size, dtype=dtype).to(device)
    keys = draw(1, heads, capacity, size, seed=1, dtype=dtype).to(device)
    values = draw(1, heads, capacity, size, seed=2, dtype=dtype).to(device)

    def attend(query: Tensor, lengths: list[int], keys: Tensor, values: Tensor) -> Tensor:
        tree = TokenTree.chain(query.shape[2] - 1, device)
        given = torch.tensor(lengths, device=device), tree.words(), tree.depth
        found: Tensor = TREE_ATTENTION.triton()(
            query, keys, values, *given, scaling=0.25, split_size=64, invariant=True, **limits
        )
        return found

    whole = attend(query, [length], keys, values)[0]
    for node in (0, 1, 5, 17, 39):
        alone = attend(query[:, :, node : node + 1], [length + node], keys, values)
        assert torch.equal(alone[0, 0], whole[node]), node
    three = [x.repeat(3, 1, 1, 1) for x in (query, keys, values)]
    batched = attend(three[0], [length, 7, 33], *three[1:])
    assert torch.equal(batched[0], whole)
