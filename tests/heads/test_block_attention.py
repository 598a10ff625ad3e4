"""Attention of training blocks against one slot at a time; anchors."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from heads.nn.anchors import Anchors
from heads.nn.block.attention import View, attend_blocks

SEGMENTS = torch.tensor(
    [[1, 1, 1, 1, 2, 2, 2, 2, 0], [1, 1, 1, 1, 1, 1, 1, 2, 2]], dtype=torch.int32
)
LAST = torch.tensor([[0, 3, 6], [2, 6, 8]])
SLOTS, HEADS, KV_HEADS, SIZE = 4, 4, 2, 6


def parts(dtype: torch.dtype) -> tuple[Tensor, tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    rows, length, blocks = SEGMENTS.shape[0], SEGMENTS.shape[1], LAST.shape[1]
    context = (draw(rows, length, KV_HEADS, SIZE), draw(rows, length, KV_HEADS, SIZE))
    own = (draw(rows, blocks, SLOTS, KV_HEADS, SIZE), draw(rows, blocks, SLOTS, KV_HEADS, SIZE))
    return draw(rows, blocks, SLOTS, HEADS, SIZE), context, own


def one_at_a_time(
    query: Tensor,
    context: tuple[Tensor, Tensor],
    own: tuple[Tensor, Tensor],
    causal: bool,
    window: int = 0,
) -> Tensor:
    """What every slot sees, listed; one softmax over the list."""
    out = torch.zeros(*query.shape[:3], HEADS, SIZE, dtype=query.dtype)
    for row in range(query.shape[0]):
        for block, last in enumerate(LAST[row].tolist()):
            every = [j for j in range(last + 1) if SEGMENTS[row, j] == SEGMENTS[row, last]]
            for slot in range(SLOTS):
                near = [j for j in every if j == last or last + 1 + slot - j < window]
                past = near if window else every
                inside = range(slot + 1) if causal else range(SLOTS)
                for head in range(HEADS):
                    g = head // (HEADS // KV_HEADS)
                    keys = [context[0][row, j, g] for j in past] + [
                        own[0][row, block, i, g] for i in inside
                    ]
                    values = [context[1][row, j, g] for j in past] + [
                        own[1][row, block, i, g] for i in inside
                    ]
                    scores = torch.stack(keys) @ query[row, block, slot, head] / math.sqrt(SIZE)
                    out[row, block, slot, head] = scores.softmax(0) @ torch.stack(values)
    return out.flatten(3)


@pytest.mark.parametrize("window", [0, 3, 5])
@pytest.mark.parametrize("causal", [False, True])
def test_many_blocks_equal_one_slot_at_a_time(causal: bool, window: int) -> None:
    query, context, own = parts(torch.float64)
    view = View.of(SEGMENTS, LAST, SLOTS, causal, flex=False, window=window)
    torch.testing.assert_close(
        attend_blocks(query, context, own, view), one_at_a_time(query, context, own, causal, window)
    )


@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize("causal", [False, True])
@torch.no_grad()
def test_flex_attention_equals_dense_scores(causal: bool, window: int) -> None:
    query, context, own = parts(torch.float32)
    dense, flex = (
        attend_blocks(
            query, context, own, View.of(SEGMENTS, LAST, SLOTS, causal, flex=way, window=window)
        )
        for way in (False, True)
    )
    torch.testing.assert_close(flex, dense, rtol=1e-5, atol=1e-5)


def generators(*seeds: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(seed) for seed in seeds]


def test_anchors_are_eligible_places_and_follow_from_the_rows_seed() -> None:
    eligible = torch.rand(3, 40, generator=torch.Generator().manual_seed(0)) < 0.6
    eligible[2] = False
    first = Anchors.sample(eligible, 8, generators(1, 2, 3))
    again = Anchors.sample(eligible, 8, generators(1, 2, 3))
    other = Anchors.sample(eligible, 8, generators(4, 2, 3))
    assert torch.equal(first.last, again.last)
    assert not torch.equal(first.last[0], other.last[0])
    assert torch.equal(first.last[1], other.last[1]), "a row's anchors depend on its own seed alone"
    assert first.valid.sum(1).tolist() == [8, 8, 0]
    for row in (0, 1):
        places = first.last[row].tolist()
        assert places == sorted(set(places)) and eligible[row, places].all()
        assert float(first.scale[row, 0]) == pytest.approx(int(eligible[row].sum()) / 8)


def test_a_row_with_few_places_takes_them_all() -> None:
    eligible = torch.zeros(2, 9, dtype=torch.bool)
    eligible[0, [2, 5]] = True
    eligible[1, :] = True
    found = Anchors.sample(eligible, 5, generators(1, 2))
    assert found.last[0, :2].tolist() == [2, 5] and found.valid.sum(1).tolist() == [2, 5]
    assert found.scale[:, 0].tolist() == pytest.approx([1.0, 9 / 5])
    piece = found.piece(1, 3)
    assert piece.last.shape == (2, 3) and piece.valid[0].tolist() == [True, False, False]
