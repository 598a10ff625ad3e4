"""Attention of training blocks against one slot at a time; anchors."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from heads.nn.anchors import Anchors
from heads.nn.block import attention
from heads.nn.block.attention import View, attend_blocks, runs_of
from train.planning.footprint import FlopCount

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


@pytest.mark.parametrize("most", [0, 3, 1 << 10])
@pytest.mark.parametrize("window", [0, 3, 5])
@pytest.mark.parametrize("causal", [False, True])
def test_many_blocks_equal_one_slot_at_a_time(
    causal: bool, window: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether every block is a run of its own, some blocks are, or all blocks of a row."""
    monkeypatch.setattr(attention, "MOST_HIDDEN", most)
    query, context, own = parts(torch.float64)
    view = View.of(SEGMENTS, LAST, SLOTS, causal, flex=False, window=window)
    blocks, rows = LAST.numel(), LAST.shape[0]
    assert view.runs is not None and rows <= len(view.runs) <= blocks
    assert (len(view.runs) == rows) == (most > 3)
    torch.testing.assert_close(
        attend_blocks(query, context, own, view), one_at_a_time(query, context, own, causal, window)
    )


def test_runs_have_the_gradients_of_all_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    query, context, own = parts(torch.float64)
    given = [part.requires_grad_() for part in (query, *context, *own)]
    weight = torch.randn(attend_blocks(query, context, own, dense_view()).shape).double()

    def gradients(view: View) -> tuple[Tensor, ...]:
        out = attend_blocks(query, context, own, view)
        return torch.autograd.grad((out * weight).sum(), given)

    monkeypatch.setattr(attention, "MOST_HIDDEN", 2)
    runs = View.of(SEGMENTS, LAST, SLOTS, False, flex=False)
    assert runs.runs is not None and len(runs.runs) > LAST.shape[0]
    torch.testing.assert_close(gradients(runs), gradients(dense_view()))


def dense_view() -> View:
    """What the blocks see, computed with the whole context."""
    return replace(View.of(SEGMENTS, LAST, SLOTS, False, flex=False), runs=None)


def test_runs_skip_what_their_blocks_do_not_see() -> None:
    """Documents of 128 places: a run has a document's places up to its last block, and computes
    few pairs that are hidden from each other."""
    segments = torch.arange(8).repeat_interleave(128)[None]
    last = torch.arange(0, 1024, 8)[None]
    runs = runs_of(View.of(segments, last, SLOTS, False, flex=False).visible)
    assert [run.blocks.start for run in runs] == [0, *(run.blocks.stop for run in runs[:-1])]
    assert runs[-1].blocks.stop == 128
    computed = 0
    for run in runs:
        places = last[0, run.blocks]
        assert run.places == slice(int(places[0]) // 128 * 128, int(places[-1]) + 1)
        pairs = run.count * (run.places.stop - run.places.start)
        assert pairs - int((places % 128 + 1).sum()) <= attention.MOST_HIDDEN
        computed += pairs
    assert computed < 128 * 1024 / 8


@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize("causal", [False, True])
@torch.no_grad()
def test_flex_attention_equals_dense_scores(
    causal: bool, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "LEAST_QUERIES", 1)
    query, context, own = parts(torch.float32)
    dense, flex = (
        attend_blocks(
            query, context, own, View.of(SEGMENTS, LAST, SLOTS, causal, flex=way, window=window)
        )
        for way in (False, True)
    )
    torch.testing.assert_close(flex, dense, rtol=1e-5, atol=1e-5)


def test_few_queries_have_dense_scores() -> None:
    """On a GPU flex attention cannot be built for every shape with few queries."""
    segments, slots = torch.ones(1, 64, dtype=torch.int32), 4
    for blocks, flex in ((31, False), (32, True)):
        last = torch.arange(blocks)[None]
        view = View.of(segments, last, slots, False, flex=True)
        assert (view.flex is not None) == flex


def test_flex_attention_runs_outside_the_modes_that_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step whose FLOPs are counted runs under a dispatch mode and uncompiled, where torch's flex
    attention cannot run backward: it leaves both, and has the gradients of dense scores."""
    query, _, own = parts(torch.float64)
    rows, keys, values = (
        part.flatten(1, 2).transpose(1, 2).clone().requires_grad_() for part in (query, *own)
    )
    compiled = []

    def backend(graph: Any, _: Any) -> Any:
        compiled.append(graph)
        return graph

    def attend(query: Tensor, key: Tensor, value: Tensor, **_: Any) -> Tensor:
        return scaled_dot_product_attention(query, key, value, enable_gqa=True)

    monkeypatch.setattr(attention, "_compiled", lambda: torch.compile(attend, backend=backend))
    with torch.compiler.set_stance("force_eager"), FlopCount() as count:
        out = attention._OutsideModes.apply(None, rows, keys, values)
        out.square().sum().backward()
    found = [part.grad for part in (rows, keys, values)]
    for part in (rows, keys, values):
        part.grad = None
    wanted = scaled_dot_product_attention(rows, keys, values, enable_gqa=True)
    wanted.square().sum().backward()
    assert len(compiled) == 1 and count.flops == 0
    assert torch.equal(out, wanted)
    for part, gradient in zip((rows, keys, values), found, strict=True):
        torch.testing.assert_close(gradient, part.grad)


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
