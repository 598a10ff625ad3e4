"""Counted operations and bytes against what is known: closed formulas, and the CPU allocator's own
records."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

from train.planning.footprint import FlopCount, Footprint


def allocator_peak(records: object) -> int:
    """Most bytes that the CPU allocator had given out at once, by a profile's memory records."""
    events = [
        event for event in records.profiler.kineto_results.events() if event.name() == "[memory]"
    ]  # type: ignore[attr-defined]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


def test_a_product_and_its_gradients() -> None:
    weight, states = (
        torch.randn(7, 5, requires_grad=True),
        torch.randn(3, 11, 5, requires_grad=True),
    )
    with FlopCount() as count:
        F.linear(states, weight).sum().backward()
    assert count.flops == 3 * 2 * 33 * 7 * 5  # forward, and one product for each gradient


@pytest.mark.parametrize("masked", [False, True])
def test_attention(masked: bool) -> None:
    query, key, value = (torch.randn(2, 3, size, 16, requires_grad=True) for size in (12, 20, 20))
    mask = torch.ones(2, 1, 12, 20, dtype=torch.bool) if masked else None
    with FlopCount() as count:
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        forward = count.flops
        out.sum().backward()
    product = 2 * 2 * 3 * 12 * 20 * 16
    assert forward == 2 * product
    # kernels that keep no weights multiply once more
    assert count.flops in (6 * product, 7 * product)


def test_bytes_follow_the_allocator() -> None:
    def work() -> None:
        states = torch.randn(256, 300)
        for _ in range(4):
            states = torch.relu(states @ weight)
        states.logsumexp(-1).sum().backward()

    weight = torch.randn(300, 300, requires_grad=True)
    work()  # its gradient is there from now on
    with Footprint() as count:
        work()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as records:
        work()
    # a mode holds arguments a little longer
    assert count.peak == pytest.approx(allocator_peak(records), rel=0.05)
    assert count.live == 0
    assert count.largest == 4 * 300 * 300
    assert count.largest_shape == (300, 300)


def test_views_and_results_in_place_are_no_new_bytes() -> None:
    kept = torch.zeros(1000)
    with Footprint() as count:
        kept.add_(1.0)
        kept.view(10, 100)[3].mul_(2.0)
        made = kept + 1
        made.mul_(3.0)
    assert (count.peak, count.live) == (4000, 4000)
