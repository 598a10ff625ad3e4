"""The packed linear layer means `F.linear`, everywhere it is used and where it must step aside."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from inference.kernels import packed_linear
from inference.kernels.packed_linear import (
    EVERYTHING,
    INTEL,
    MAX_ROWS,
    NO_AVX512,
    Limits,
    pack_linears,
    packed_linears,
    packs,
    supported,
)


@pytest.mark.parametrize("limits", [EVERYTHING, INTEL, NO_AVX512])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 2, 5, 33, MAX_ROWS, MAX_ROWS + 1])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(48, 32), (2048, 300)])
def test_equals_the_plain_product(
    limits: Limits,
    dtype: torch.dtype,
    rows: int,
    bias: bool,
    shape: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(packed_linear, "limits", lambda: limits)
    torch.manual_seed(0)
    plain = nn.Linear(shape[1], shape[0], bias=bias).to(dtype)
    x = torch.randn(1, rows, shape[1]).to(dtype)
    with torch.no_grad():
        expected = plain(x)
        pack_linears(plain)
        found = plain(x)
    assert found.shape == expected.shape and found.dtype == dtype
    tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    worth = dtype != torch.float32 or shape[0] * shape[1] >= limits.elements
    assert ("forward" in plain.__dict__) == (supported() and packs(dtype) and worth)


@pytest.mark.parametrize(
    ("intel", "mkl", "capability", "expected"),
    [
        (True, True, "AVX2", INTEL),
        (True, True, "AVX512", INTEL),
        (False, True, "AVX512", EVERYTHING),
        (False, True, "AVX2", NO_AVX512),
        (True, False, "AVX512", EVERYTHING),
    ],
)
def test_the_limits_are_those_of_the_cpu(
    intel: bool, mkl: bool, capability: str, expected: Limits, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_linear, "is_intel", lambda: intel)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: mkl)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert packed_linear.limits() == expected


def test_a_packed_path_can_be_taken_away_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_linear, "limits", lambda: EVERYTHING)
    layer = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)).requires_grad_(False)
    pack_linears(layer)
    before = [part.__dict__.get("forward") for part in layer]
    with packed_linear.unpacked_linears(layer), packed_linear.unpacked_linears(None):
        assert all("forward" not in part.__dict__ for part in layer)
    assert [part.__dict__.get("forward") for part in layer] == before
    assert (None not in before) == supported()


def test_training_passes_are_plain_and_the_context_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_linear, "limits", lambda: EVERYTHING)
    layer = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    x = torch.randn(3, 8)
    with packed_linears(layer):
        layer(x).sum().backward()  # gradients recorded: the plain path
    assert layer[0].weight.grad is not None
    assert all("forward" not in part.__dict__ for part in layer)
    with torch.no_grad():
        layer[0].weight.mul_(2)
        before = layer(x)
        with packed_linears(layer):
            torch.testing.assert_close(layer(x), before)  # packed anew after the weights changed


def test_float64_and_foreign_objects_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_linear, "limits", lambda: EVERYTHING)
    layer = nn.Linear(8, 8).double()
    pack_linears(layer)
    assert "forward" not in layer.__dict__
    with packed_linears(object()):
        pass


def test_a_weight_that_was_changed_in_place_is_packed_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(packed_linear, "limits", lambda: EVERYTHING)
    layer, x = nn.Linear(8, 4).requires_grad_(False), torch.randn(3, 8)
    pack_linears(layer)
    before = layer(x)
    layer.weight.mul_(2)
    layer.bias.mul_(2)
    torch.testing.assert_close(layer(x), 2 * before)
