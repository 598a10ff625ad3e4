"""The target in fewer bits as its own drafter. (What holds for every kind: test_contract.py.)"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from heads.api.checkpoint import new_drafter
from heads.api.errors import UserError
from heads.api.tree import TokenTree
from heads.nn.quantized import Int4Linear, Int8Linear, PackedLinear
from heads.quantized_self import Config, Drafter
from inference.decoding.config import DecodeConfig
from inference.decoding.engine import Engine
from inference.parity import check_parity
from inference.target.model import TargetModel
from tests.heads.explicit import LONG_PAIR
from tests.heads.micro import MicroTarget, micro_target, packed_batch, seen_states
from tests.heads.test_target_layers import requests, shaken_target
from tests.models import random_target


def drafter_of(target: TargetModel | MicroTarget, **settings: Any) -> Drafter:
    config = Config(**{"group_size": 8, **settings})
    drafter: Drafter = new_drafter("quantized_self", config, target.info, target.weights, 0)
    return drafter


def packed(bits: int, weight: torch.Tensor, bias: torch.Tensor | None = None) -> PackedLinear:
    return Int8Linear(weight, bias) if bits == 8 else Int4Linear(weight, bias, 32)


def weight(rows: int = 48, columns: int = 64, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(rows, columns, generator=generator, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("bits", [4, 8])
def test_every_weight_is_within_half_a_step(bits: int) -> None:
    values = weight()
    found = packed(bits, values).unpacked(torch.float64)
    groups = values.view(48, -1, 64 if bits == 8 else 32)
    steps = groups.abs().amax(-1) / 127 if bits == 8 else (groups.amax(-1) - groups.amin(-1)) / 15
    gap = (found - values).view_as(groups).abs()
    assert bool((gap <= steps[..., None] * (0.5 + 1e-9)).all())
    assert float(gap.max()) > 0.3 * float(steps.min()), "something was rounded"


@pytest.mark.parametrize("bits", [4, 8])
def test_constant_and_zero_weights_survive(bits: int) -> None:
    values = torch.cat(
        [torch.zeros(16, 64), torch.full((16, 64), 0.37), torch.full((16, 64), -2.0)]
    )
    torch.testing.assert_close(
        packed(bits, values).unpacked(torch.float32), values, rtol=1e-2, atol=1e-3
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bits", [4, 8])
def test_the_product_is_that_of_the_unpacked_weight(
    bits: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    bias = torch.linspace(-1, 1, 48).to(dtype)
    linear = packed(bits, weight(dtype=dtype), bias)
    monkeypatch.setattr("heads.nn.quantized.FAST_DTYPES", ())
    numbers = packed(bits, weight(dtype=dtype)).unpacked(torch.float64)
    for shape in ((64,), (1, 64), (2, 5, 64), (70, 64)):
        states = torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to(dtype)
        expected = torch.nn.functional.linear(states.double(), numbers, bias.double())
        tolerance = {torch.float64: 1e-13, torch.float32: 1e-6, torch.bfloat16: 1e-2}[dtype]
        gap = (linear(states).double() - expected).abs().max() / expected.abs().max()
        assert float(gap) <= tolerance
        assert linear(states).dtype == dtype and linear(states).shape == (*shape[:-1], 48)


@pytest.mark.parametrize("bits", [4, 8])
def test_bfloat16_multiplies_packed_weights_where_torch_can(bits: int) -> None:
    linear = packed(bits, weight(dtype=torch.bfloat16))
    assert not packed(bits, weight(dtype=torch.float32)).fast
    if torch.backends.cpu.get_cpu_capability() not in ("AVX512", "AVX2"):
        pytest.skip("no packed products for this CPU")
    assert linear.fast


@pytest.mark.parametrize(("bits", "most"), [(8, 1.05), (4, 0.64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_numbers_are_all_that_is_kept(bits: int, most: float, dtype: torch.dtype) -> None:
    values = weight(256, 512, dtype)
    linear = packed(bits, values)
    size = sum(buffer.numel() * buffer.element_size() for buffer in linear.buffers())
    # scales: 4 bytes per 512 weights at 8 bits; two numbers per 32 weights at 4 bits
    assert size <= values.numel() * (most + (0.13 if bits == 4 and dtype == torch.float32 else 0))
    assert not linear.state_dict() and not list(linear.parameters())


@pytest.mark.parametrize(("bits", "least"), [(8, 0.95), (4, 0.5)])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_it_picks_what_the_target_picks(family: str, bits: int, least: float) -> None:
    """Random weights are the hard case: their logits lie close together."""
    target = shaken_target(family)
    drafter = drafter_of(target, bits=bits)
    passes = [
        record
        for done in Engine(target, drafter, DecodeConfig(batch_size=4, depth=4)).run(requests(60))
        for record in done.passes
    ]
    accepted, refused = sum(p.accepted for p in passes), sum(p.rejected for p in passes)
    assert accepted / (accepted + refused) > least


@pytest.mark.parametrize(
    "settings",
    [{"bits": 8}, {"bits": 4}, {"bits": 4, "layers": (0, 3), "quantize_head": False}],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_training_computes_what_decoding_computes(
    settings: dict[str, Any], dtype: torch.dtype
) -> None:
    """There is no training; the parity check still holds both ways of running the layers against
    each other."""
    target = micro_target(dtype)
    report = check_parity(target, drafter_of(target, **settings), LONG_PAIR, depth=4)
    assert report.compared >= 24


@torch.no_grad()
def test_what_is_committed_has_the_targets_own_keys() -> None:
    target = micro_target()
    exact, rounded = (drafter_of(target, bits=bits) for bits in (8, 4))
    seen = seen_states(target, exact.needs, LONG_PAIR, [(0, 7), (0, 7)])
    states = [drafter.start(seen, TokenTree.chain(3), 32) for drafter in (exact, rounded)]
    for one, other in zip(
        states[0].keys + states[0].values, states[1].keys + states[1].values, strict=True
    ):
        assert torch.equal(one[:, :7], other[:, :7])
    assert not torch.equal(states[0].keys[1][:, 7], states[1].keys[1][:, 7]), "the root is drafted"


def test_memory_counts_the_packed_weights() -> None:
    target = random_target()
    shared = sum(
        p.numel() for n, p in target.model.named_parameters() if "proj" in n or "lm_head" in n
    )
    for bits, low, high in ((8, 1.0, 1.4), (4, 0.5, 2.6)):
        counted = Engine(target, drafter_of(target, bits=bits)).memory_bytes()["drafter"]
        assert low * shared <= counted <= high * shared
    less = Engine(target, drafter_of(target, bits=8, quantize_head=False)).memory_bytes()["drafter"]
    assert less < Engine(target, drafter_of(target, bits=8)).memory_bytes()["drafter"]


def test_binding_again_replaces_what_was_packed() -> None:
    target = micro_target()
    drafter = drafter_of(target, bits=8)
    before = len(drafter.packed)
    drafter.bind(target.weights)
    assert len(drafter.packed) == before == 5 * 7 + 1


def test_there_is_nothing_to_train() -> None:
    target = micro_target()
    drafter = drafter_of(target)
    assert Drafter.works_untrained(drafter.config) and not list(drafter.parameters())
    with pytest.raises(UserError, match="nothing to train"):
        drafter.loss(packed_batch(target, drafter.needs, [LONG_PAIR]))


def test_groups_that_do_not_fit_are_refused() -> None:
    with pytest.raises(
        UserError, match=r"group_size 32 does not divide the target's sizes \[16, 24\]"
    ):
        drafter_of(micro_target(), group_size=32)
    assert drafter_of(micro_target(), group_size=32, bits=8).needs.taps == (0, 1, 2, 3, 4)
    with pytest.raises(UserError, match=r"knows those of llama"):
        drafter_of(random_target("olmo2"))
