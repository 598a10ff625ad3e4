"""Merged projections: one product, the same numbers, the same weights at the same names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from inference.target.merged import merge


class Block(nn.Module):
    """Two groups of projections, as families name them, and one that is in none."""

    def __init__(self, bias: bool, more: bool = False) -> None:
        super().__init__()
        self.q_proj = nn.Linear(6, 8, bias=bias)
        self.k_proj = nn.Linear(6, 4, bias=bias)
        self.v_proj = nn.Linear(6, 4, bias=bias != more)
        self.gate_proj, self.up_proj = nn.Linear(6, 10, bias=bias), nn.Linear(6, 10, bias=bias)
        self.o_proj = nn.Linear(6, 3)
        self.requires_grad_(False)


def outputs(block: Any, x: Tensor, order: str) -> dict[str, Tensor]:
    names = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "g": "gate_proj", "u": "up_proj"}
    return {name: getattr(block, names[name])(x) for name in order}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("order", ["qkvgu", "vkqug", "qvk", "kq"])
def test_parts_are_what_the_layers_computed(
    monkeypatch: pytest.MonkeyPatch, bias: bool, order: str
) -> None:
    block, x, other = Block(bias), torch.randn(2, 3, 6), torch.randn(2, 3, 6)
    before, weights = (
        outputs(block, x, "qkvgu"),
        {k: v.clone() for k, v in block.state_dict().items()},
    )
    products = []
    linear = F.linear
    monkeypatch.setattr(F, "linear", lambda *given: products.append(1) or linear(*given))  # type: ignore[func-returns-value]
    assert merge(block) == 3
    assert merge(block) == 0  # a second time nothing is left
    found = outputs(block, x, order)
    for name, value in found.items():
        torch.testing.assert_close(value, before[name])
    if order == "qkvgu":
        assert len(products) == 2
    changed = outputs(block, other, "qkvgu")  # nothing of the last states is left
    assert not torch.allclose(changed["k"], before["k"])
    assert block.state_dict().keys() == weights.keys()
    for name, value in block.state_dict().items():
        assert torch.equal(value, weights[name])


def test_weights_are_held_once() -> None:
    block = Block(False)
    merge(block)
    base = block.q_proj.weight.untyped_storage().data_ptr()
    assert block.k_proj.weight.untyped_storage().data_ptr() == base
    assert block.v_proj.weight.untyped_storage().nbytes() == 16 * 6 * 4


def test_projections_that_differ_in_kind_stay_apart() -> None:
    assert merge(Block(True, more=True)) == 1  # one of three has no bias; gate and up are alike
    trained = Block(True).requires_grad_(True)
    assert merge(trained) == 0
    mixed = Block(True)
    mixed.k_proj.to(torch.bfloat16)
    assert merge(mixed) == 1
