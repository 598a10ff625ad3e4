"""The residual blocks of all draft heads in one launch: the kernel and the torch reference against
the same in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from heads.kernels.dispatch import FLOATS, VARIABLE, choose
from heads.medusa import Config, Drafter
from inference.kernels import heads_gemm
from inference.kernels.reference import heads as reference_heads
from inference.kernels.reference.heads import RESIDUAL_BLOCKS
from tests.heads.kernels.devices import DEVICES, ON_CPU
from tests.models import random_target

LAST_PLACE = {torch.float32: 2.0**-23, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}


def case(heads: int, rows: int, hidden: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Different states for each head, weights [K, H, H] that keep their size, biases [K, H]."""
    torch.manual_seed(hidden + rows)
    given = (
        torch.randn(heads, rows, hidden),
        torch.randn(heads, hidden, hidden) / hidden**0.5,
        torch.randn(heads, hidden),
    )
    return given[0].to(dtype), given[1].to(dtype), given[2].to(dtype)


def loop(states: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Head by head and row by row, in float64."""
    out = torch.empty(states.shape, dtype=torch.float64)
    for head in range(states.shape[0]):
        for row in range(states.shape[1]):
            x = states[head, row].double().cpu()
            before = weight[head].double().cpu() @ x + bias[head].double().cpu()
            out[head, row] = x + before * torch.sigmoid(before)
    return out


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("heads", "rows", "hidden"), [(1, 1, 8), (3, 5, 72), (2, 16, 256), (4, 3, 130), (2, 17, 64)]
)
def test_equals_the_product_in_float64(
    heads: int, rows: int, hidden: int, dtype: torch.dtype, device: str
) -> None:
    given = case(heads, rows, hidden, dtype)
    expected = loop(*given)
    # one rounding of the result, and what float32 sums of `hidden` products may lose; the reference
    # rounds three times
    one = LAST_PLACE[dtype] * expected.abs() + 1e-5
    on_device = [t.to(device) for t in given]
    found = RESIDUAL_BLOCKS.triton()(*on_device)
    assert found.dtype == dtype and found.shape == expected.shape
    reference = reference_heads.residual_blocks(*on_device)
    rough = 4 * LAST_PLACE[dtype]
    torch.testing.assert_close(reference.cpu().double(), expected, rtol=rough, atol=rough + 1e-5)
    if rows > heads_gemm.MAX_ROWS:
        assert torch.equal(found, reference)
    else:
        assert bool(((found.cpu().double() - expected).abs() <= one).all())


def test_the_reference_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where kernels run: `choose` must not ask the GPU before it knows that."""
    monkeypatch.delenv(VARIABLE, raising=False)
    assert choose(RESIDUAL_BLOCKS, "cuda", torch.bfloat16).implementation == "reference"


@ON_CPU
def test_all_heads_read_the_same_states() -> None:
    """Medusa's first block is given an expanded tensor: nothing may be read with the stride of a
    copied one."""
    states, weight, bias = case(3, 4, 40, torch.float32)
    shared = states[:1].expand(3, 4, 40)
    found = RESIDUAL_BLOCKS.triton()(shared, weight, bias)
    torch.testing.assert_close(
        found, reference_heads.residual_blocks(shared.contiguous(), weight, bias)
    )
    assert not torch.allclose(found, reference_heads.residual_blocks(states, weight, bias)), (
        "heads must differ"
    )


@ON_CPU
def test_weights_are_not_transposed() -> None:
    """Negative control: with U and its transpose exchanged the comparison fails."""
    given = case(2, 3, 48, torch.float32)
    found = RESIDUAL_BLOCKS.triton()(*given).double()
    turned = loop(given[0], given[1].transpose(1, 2), given[2])
    assert not torch.allclose(found, turned, atol=0.1)


@ON_CPU
def test_medusas_own_path_is_what_is_computed() -> None:
    """What the LM heads read of a two-block Medusa with weights of its own."""
    target = random_target(dtype=torch.float32)
    drafter = Drafter(Config(num_heads=3, num_layers=2), target.info)
    torch.manual_seed(1)
    with torch.no_grad():
        drafter.residual_weight.normal_(0, 0.3)
        drafter.residual_bias.normal_(0, 0.3)
        drafter.bind(target.weights)
        hidden = torch.randn(4, target.info.hidden_size)
        states = hidden.expand(3, *hidden.shape)
        for weight, bias in zip(drafter.residual_weight, drafter.residual_bias, strict=True):
            states = RESIDUAL_BLOCKS.triton()(states, weight, bias)
        torch.testing.assert_close(
            target.weights.logits(states),
            drafter._logits(drafter._outputs(hidden, 3)),
            rtol=1e-4,
            atol=1e-4,
        )
