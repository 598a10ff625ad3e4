"""Parts computed again: the same loss and gradients to the last bit, in every kind, for less memory
where there are layers. Parts compiled: the same up to the order of sums.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from heads.api.checkpoint import new_drafter
from heads.api.registry import get_kind
from heads.nn import losses
from heads.nn.checkpointing import compiling, network_part, recomputing
from tests.heads.explicit import PAIR
from tests.heads.micro import micro_target, packed_batch
from tests.heads.recipes import TRAINED, build
from tests.train.peak import PeakBytes

LONG = [[(7 * i + row) % 41 for i in range(192)] for row in range(2)]


def gradients(
    drafter: Any, batch: Any, on: bool, compiled: bool = False
) -> tuple[Tensor, dict[str, Tensor]]:
    """As a training does it: the backward pass comes after the blocks."""
    drafter.zero_grad()
    with recomputing(on), compiling(compiled):
        loss = drafter.loss(batch).loss_sum
    loss.backward()
    return loss.detach(), {
        n: p.grad.clone() for n, p in drafter.named_parameters() if p.grad is not None
    }


@pytest.mark.parametrize("name", TRAINED)
def test_loss_and_gradients_are_the_same_to_the_last_bit(name: str) -> None:
    target = micro_target()
    drafter = build(name, target)
    batch = packed_batch(target, drafter.needs, [PAIR])
    plain, kept = gradients(drafter, batch, False)
    again, found = gradients(drafter, batch, True)
    assert torch.equal(plain, again)
    assert kept.keys() == found.keys()
    assert all(torch.equal(kept[weight], found[weight]) for weight in kept)


@pytest.mark.parametrize("name", ["dflash", "domino", "lilicorr", "uno"])
def test_blocks_in_several_chunks_are_the_same_to_the_last_bit(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks are computed again in the backward pass, and their layers once more within them."""
    target = micro_target()
    drafter = build(name, target)
    batch = packed_batch(target, drafter.needs, [PAIR])
    calls = []
    plain_forward = type(drafter)._sums
    monkeypatch.setattr(
        type(drafter), "_sums", lambda *given: calls.append(1) or plain_forward(*given)
    )
    monkeypatch.setattr(losses, "CHUNK_ELEMENTS", 600)
    plain, kept = gradients(drafter, batch, False)
    assert len(calls) > 2, "one chunk"
    again, found = gradients(drafter, batch, True)
    assert torch.equal(plain, again)
    assert all(torch.equal(kept[weight], found[weight]) for weight in kept)


@pytest.mark.slow  # a C++ compiler at work
@pytest.mark.parametrize("kind", ["eagle3", "dflash"])
@pytest.mark.parametrize("recompute", [False, True])
def test_compiled_parts_give_the_same_loss_and_gradients(
    kind: str, recompute: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(losses, "CHUNK_ELEMENTS", 600)  # a block drafter's in several chunks
    target = micro_target(torch.float32)
    drafter = build(kind, target).float()
    batch = packed_batch(target, drafter.needs, [PAIR])
    plain, kept = gradients(drafter, batch, False)
    torch._dynamo.reset()  # programs that another test has made
    torch._dynamo.utils.counters.clear()
    again, found = gradients(drafter, batch, recompute, compiled=True)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0, "nothing was compiled"
    torch.testing.assert_close(again, plain, rtol=1e-5, atol=1e-5)
    assert kept.keys() == found.keys()
    for weight, value in kept.items():
        largest = max(1.0, float(value.abs().max()))
        torch.testing.assert_close(found[weight], value, rtol=1e-4, atol=1e-5 * largest)


@pytest.mark.parametrize(
    ("kind", "settings", "most"),
    [
        ("eagle3", {"ttt_steps": 6, "intermediate_size": 256}, 0.6),
        ("distilled", {"num_layers": 6, "intermediate_size": 256}, 0.6),
        (
            "dflash",
            {"num_layers": 6, "intermediate_size": 256, "block_size": 5, "num_anchors": 32},
            0.7,
        ),
    ],
)
def test_the_peak_of_memory_falls(kind: str, settings: dict[str, Any], most: float) -> None:
    target = micro_target(torch.float32)
    config = get_kind(kind).config_class(**settings)
    drafter = new_drafter(
        kind, config, target.info, target.weights, 0, torch.ones(41, dtype=torch.int64)
    ).float()
    batch = packed_batch(target, drafter.needs, [LONG])
    peaks = []
    for on in (False, True):
        gradients(drafter, batch, on)  # buffers that stay
        gc.collect()
        with PeakBytes() as memory:
            gradients(drafter, batch, on)
        peaks.append(memory.peak)
    assert peaks[1] < most * peaks[0], peaks


def test_a_part_within_a_part_is_computed_twice_at_most() -> None:
    calls = []

    @network_part
    def inner(x: Tensor) -> Tensor:
        calls.append("inner")
        return x.sin()

    @network_part
    def outer(x: Tensor) -> Tensor:
        return inner(x).cos()

    x = nn.Parameter(torch.ones(3))
    with recomputing():
        total = outer(x).sum()
    assert calls == ["inner"]
    total.backward()
    assert calls == ["inner", "inner"]
    with torch.no_grad(), recomputing():
        outer(x)
    assert calls == ["inner"] * 3
