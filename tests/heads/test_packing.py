"""Packed rows: their documents, attention document by document against one softmax under a mask
over whole rows, and memory that grows with a row's length."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from heads.api.batch import TrainBatch
from heads.api.checkpoint import new_drafter
from heads.api.registry import get_kind
from heads.nn import attention, packing
from heads.nn.checkpointing import compiling, network_part
from heads.nn.feature.masks import Masks
from heads.nn.feature.parallel import AnchoredRows, anchored_attention
from heads.nn.packing import Document, Packing, documents, first_places, within_documents
from tests.heads.micro import MicroTarget, micro_target, packed_batch
from tests.inference.target.test_causal import Largest
from tests.train.peak import PeakBytes

HEADS, GROUPS, SIZE = 2, 3, 8
ROWS: dict[str, list[list[int]]] = {
    "padding": [[1, 1, 1, 1, 1, 2, 2, 3, 0, 0, 0, 0], [1] * 12],
    "one document": [[1] * 12, [1] * 12],
    "documents of one token": [[*range(1, 13)], [1, 2, 3, 3, 3, 3, 3, 3, 4, 5, 6, 6]],
    "nothing but padding": [[0] * 12, [1] * 11 + [0]],
}


def batch_of(segments: Tensor) -> TrainBatch:
    positions = torch.arange(segments.shape[1]) - first_places(segments)
    return TrainBatch(segments.long(), positions, segments, segments > 0)


def draw(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()


def one_softmax(query: Tensor, keys: list[Tensor], values: list[Tensor], seen: Tensor) -> Tensor:
    """All of query [B, Q, h, D] over all of keys and values [B, S, g, D] laid side by side, where
    seen [B, 1, Q, S] -> [B, Q, h * D]."""
    key, value = (
        torch.cat(list(parts), 1).repeat_interleave(GROUPS, 2) for parts in (keys, values)
    )
    scores = torch.einsum("bqhd,bshd->bhqs", query, key) * SIZE**-0.5
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    return torch.einsum("bhqs,bshd->bqhd", weights, value).flatten(2)


def assert_same(found: Tensor, expected: Tensor, leaves: list[Tensor]) -> None:
    """Values, and gradients of a sum that weighs every one differently."""
    torch.testing.assert_close(found, expected)
    weigh = draw(*found.shape, seed=9).detach()
    of_found, of_expected = (
        torch.autograd.grad((each * weigh).sum(), leaves) for each in (found, expected)
    )
    torch.testing.assert_close(of_found, of_expected)


@pytest.fixture(params=[1, 4, 100], ids=["alone", "neighbours together", "whole rows together"])
def together(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(packing, "TOGETHER", request.param)
    return int(request.param)


@pytest.fixture(params=[1 << 26, 100, 1], ids=["at once", "in chunks", "row by row"])
def chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "CHUNK_ELEMENTS", request.param)


def test_documents_are_runs_of_equal_numbers() -> None:
    segments = torch.tensor([[1, 1, 1, 1, 1, 2, 2, 3, 0, 0], [4, 5, 5, 5, 5, 5, 5, 5, 5, 5]])
    positions = torch.tensor([[0, 1, 2, 3, 4, 2, 3, 0, 0, 1], [7, *range(9)]])
    lying = documents(segments, positions)
    assert lying[:3] == (Document(0, 0, 5, 0), Document(0, 5, 7, 2), Document(0, 7, 8, 0))
    assert lying[3:] == (Document(0, 8, 10, 0), Document(1, 0, 1, 7), Document(1, 1, 10, 0))
    assert first_places(segments).tolist() == [[0] * 5 + [5, 5, 7, 8, 8], [0] + [1] * 9]
    one_row = documents(torch.ones(2, 3).int(), torch.arange(3)[None])
    assert one_row == (Document(0, 0, 3, 0), Document(1, 0, 3, 0))


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_stretches_cover_the_rows(rows: list[list[int]], together: int) -> None:
    segments = torch.tensor(rows, dtype=torch.int32)
    packed = Packing.of(batch_of(segments))
    allowed, at = torch.zeros(24, 24, dtype=torch.bool), 0
    for stretch in packed.stretches:
        for row in range(stretch.rows):
            span = slice(at, at + stretch.length)
            plain = torch.ones(stretch.length, stretch.length, dtype=torch.bool).tril()
            allowed[span, span] = plain if stretch.mask is None else stretch.mask[row, 0]
            # what shares a mask is short
            assert stretch.mask is None or stretch.length <= together
            at += stretch.length
    assert at == 24
    assert torch.equal(allowed, torch.block_diag(*within_documents(segments)[:, 0]).bool())
    assert (packed.whole is None) == (len(packed.stretches) > 1)


def test_short_rows_and_rows_of_one_document_are_attended_to_at_once() -> None:
    several = torch.tensor([ROWS["padding"][0]] * 2, dtype=torch.int32)
    whole = Packing.of(batch_of(several)).whole
    assert whole is not None and (whole.rows, whole.length) == (2, 12)
    assert whole.mask is not None
    long = torch.ones(2, 4 * packing.TOGETHER, dtype=torch.int32)
    alone = Packing.of(batch_of(long)).whole
    assert alone == packing.Stretch(2, 4 * packing.TOGETHER, None)
    long[0, 3] = 2
    assert Packing.of(batch_of(long)).whole is None


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_a_sequence_is_one_softmax_within_documents(rows: list[list[int]], together: int) -> None:
    segments = torch.tensor(rows, dtype=torch.int32)
    query = draw(2, 12, HEADS * GROUPS, SIZE)
    key, value = draw(2, 12, HEADS, SIZE, seed=1), draw(2, 12, HEADS, SIZE, seed=2)
    found = attention.sequence_attention(query, key, value, Packing.of(batch_of(segments)))
    expected = one_softmax(query, [key], [value], within_documents(segments))
    assert_same(found, expected, [query, key, value])


@pytest.mark.parametrize("limit", [None, 0, 1, 3])
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_later_steps_are_one_softmax_with_their_own_columns(
    rows: list[list[int]], together: int, chunks: None, limit: int | None
) -> None:
    segments = torch.tensor(rows, dtype=torch.int32)
    query = draw(2, 12, HEADS * GROUPS, SIZE)
    keys, values = (
        [draw(2, 12, HEADS, SIZE, seed=seed + step) for step in range(3)] for seed in (10, 20)
    )
    packed = Packing.of(batch_of(segments))
    found = attention.chained_attention(query, keys, values, packed, limit)
    seen, place = within_documents(segments), torch.arange(12)
    if limit is not None:
        seen = seen & (place > place[:, None] - limit)
    own = torch.eye(12, dtype=torch.bool).expand(2, 1, -1, -1)
    expected = one_softmax(query, keys, values, torch.cat([seen, own, own], -1))
    assert_same(found, expected, [query, *keys, *values])


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_anchors_see_their_document_up_to_themselves(rows: list[list[int]], chunks: None) -> None:
    segments = torch.tensor(rows, dtype=torch.int32)
    order = torch.tensor([[7, 0, 9, 4, 1], [11, 3, 2, 8, 5]])
    anchors = AnchoredRows(order, (5, 4), (torch.ones(2, 5).bool(), torch.ones(2, 4).bool()))
    query = draw(2, 4, HEADS * GROUPS, SIZE)
    keys, values = (
        [draw(2, 12 if step == 0 else 4, HEADS, SIZE, seed=seed + step) for step in range(3)]
        for seed in (10, 20)
    )
    found = anchored_attention(query, keys, values, anchors.reach(segments))
    place = order[:, :4, None, None].expand(-1, -1, 1, 12).transpose(1, 2)
    seen = within_documents(segments).gather(2, place)
    own = torch.eye(4, dtype=torch.bool).expand(2, 1, -1, -1)
    expected = one_softmax(query, keys, values, torch.cat([seen, own, own], -1))
    assert_same(found, expected, [query, *keys, *values])


def test_masks_see_the_same_in_every_piece() -> None:
    segments = torch.tensor(ROWS["padding"], dtype=torch.int32)
    masks = Masks(
        torch.tensor([[0, 0, 0, 5, 7, 7], [3, 3, 9, 0, 0, 0]]),
        torch.tensor([[1, 2, 3, 1, 1, 2], [1, 2, 1, 0, 0, 0]]),
        torch.tensor([[True] * 6, [True] * 3 + [False] * 3]),
        most=3,
    )
    whole = masks.visible(segments, slice(0, 6))
    assert whole.shape == (2, 1, 6, 18)
    for row, number in ((0, 2), (0, 5), (1, 1)):
        place, step = int(masks.place[row, number]), int(masks.step[row, number])
        text = [t for t in range(place + 1) if segments[row, t] == segments[row, place]]
        own = [12 + each for each in range(number - step + 1, number + 1)]
        assert whole[row, 0, number].nonzero().squeeze(1).tolist() == text + own
    for span in (slice(0, 2), slice(2, 5), slice(3, 6), slice(5, 6)):
        first, piece = masks.seen_from(span), masks.visible(segments, span)
        assert torch.equal(piece[..., :12], whole[:, :, span, :12])
        valid = masks.valid[:, span]
        assert torch.equal(
            piece[..., 12:].transpose(1, 2)[valid],
            whole[:, :, span, 12 + first : 12 + span.stop].transpose(1, 2)[valid],
        )
        assert piece.any(-1).all(), "an empty row has no softmax"
        # and nothing is seen beyond the piece
        assert not whole[:, :, span, 12 : 12 + first].transpose(1, 2)[valid].any()


SMALL: dict[str, tuple[str, dict[str, Any]]] = {
    "eagle3": ("eagle3", {"ttt_steps": 3}),
    "eagle3 behind anchors": ("eagle3", {"ttt_steps": 3, "num_anchors": 16}),
    "dflash": ("dflash", {"num_anchors": 16, "num_layers": 2}),
    "uno": ("uno", {"rank": 4, "block_size": 4, "curriculum": (), "num_anchors": 8}),
    "peagle": ("peagle", {"num_layers": 1, "depths": 3}),
    "pard": ("pard", {"from_target_layers": (0,), "depth": 4}),
    "hydra": ("hydra_heads", {"num_heads": 2, "prefix_layer": True}),
    "mtp": ("mtp", {"depths": 2}),
    "fastmtp": ("mtp", {"depths": 2, "shared": True}),
    "distilled": ("distilled", {"from_target_layers": (0,)}),
    "kangaroo": ("early_exit", {"exit_layer": 2, "adapter": "attention"}),
    "skipped layers": ("early_exit", {"layers": (0, 2)}),
}


@pytest.mark.parametrize("name", SMALL)
def test_memory_of_a_loss_grows_with_the_length_of_a_row(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four times as long rows of documents four times as long hold four times as much at most;
    anything as large as the square of a row would hold sixteen times as much."""
    monkeypatch.setattr(attention, "CHUNK_ELEMENTS", 1 << 16)
    target, (kind, settings) = micro_target(torch.float32), SMALL[name]
    drafter = new_drafter(
        kind,
        get_kind(kind).config_class(**settings),
        target.info,
        target.weights,
        0,
        torch.ones(41, dtype=torch.int64),
    ).float()
    peaks, largest = [], []
    for length in (192, 768):
        rows = [[[token % 41 for token in range(n)] for n in (length * 3 // 4, length // 4)]]
        batch = packed_batch(target, drafter.needs, rows)
        if batch.taps is not None:  # what is trained where a kind has no weights of its own
            batch.taps.requires_grad_()
        with PeakBytes() as memory, Largest() as seen:
            drafter.loss(batch).loss_sum.backward()
        peaks.append(memory.peak)
        largest.append(seen.elements)
    # the prompts are no longer than before, so a little more is supervised
    assert largest[1] <= 4.1 * largest[0]
    assert peaks[1] <= 4.1 * peaks[0]


@pytest.mark.slow  # a billion pairs of places
def test_a_row_of_32k_tokens_trains_in_a_fraction_of_a_mask(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One document fills the row, which is the hardest case. A mask over it would take 1 GiB, and
    one head's scores of one step 4 GiB. What is held beyond the row is a few times
    `CHUNK_ELEMENTS`, which is smaller here than otherwise so that it does not hide the rest."""
    monkeypatch.setattr(attention, "CHUNK_ELEMENTS", 1 << 22)
    target = micro_target(torch.float32, hidden=8, layers=4, heads=1, kv_heads=1)
    counts = torch.ones(41, dtype=torch.int64)
    config = get_kind("eagle3").config_class(ttt_steps=2)
    drafter = new_drafter("eagle3", config, target.info, target.weights, 0, counts).float()
    length, hidden, taps = 32_768, 8, len(drafter.needs.taps)
    places, generator = torch.arange(length)[None], torch.Generator().manual_seed(0)
    batch = TrainBatch(
        places % 41,
        places,
        torch.ones(1, length, dtype=torch.int32),
        torch.ones(1, length, dtype=torch.bool),
        torch.randn(1, length, taps, hidden, generator=generator),
        torch.randn(1, length, hidden, generator=generator),
        target.weights.logits,
    )
    optimiser = torch.optim.AdamW(drafter.parameters(), lr=1e-3)
    before = [parameter.detach().clone() for parameter in drafter.parameters()]
    with PeakBytes() as memory, Largest() as seen:
        loss = drafter.loss(batch).loss_sum
        loss.backward()
        optimiser.step()
    assert bool(torch.isfinite(loss))
    assert any(
        not torch.equal(old, new) for old, new in zip(before, drafter.parameters(), strict=True)
    )
    mask = length * length
    assert memory.peak < mask / 4 and 4 * seen.elements < mask / 16


@pytest.mark.parametrize("kind", ["eagle3", "pard", "peagle"])
def test_documents_alone_give_the_loss_of_a_mask_over_whole_rows(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target: MicroTarget = micro_target()
    settings = {"eagle3": {"ttt_steps": 3}, "pard": {"depth": 4}, "peagle": {"depths": 3}}[kind]
    drafter = new_drafter(
        kind,
        get_kind(kind).config_class(**settings),
        target.info,
        target.weights,
        0,
        torch.ones(41, dtype=torch.int64),
    ).double()
    rows = [[list(range(1, 14)), list(range(7, 30)), [5, 6]], [list(range(20))]]
    batch, results = packed_batch(target, drafter.needs, rows), []
    for together, chunk in ((100, 1 << 26), (1, 1 << 26), (24, 300)):
        monkeypatch.setattr(packing, "TOGETHER", together)
        monkeypatch.setattr(attention, "CHUNK_ELEMENTS", chunk)
        drafter.zero_grad()
        loss = drafter.loss(batch).loss_sum
        loss.backward()
        gradients = [p.grad.clone() for p in drafter.parameters() if p.grad is not None]
        results.append([loss.detach(), *gradients])
    for other in results[1:]:
        torch.testing.assert_close(other, results[0])


@pytest.mark.slow  # a C++ compiler at work
def test_other_documents_need_no_other_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "TOGETHER", 4)

    @network_part
    def part(query: Tensor, key: Tensor, attend: Any) -> Tensor:
        out: Tensor = attend(query.sin(), [key, key + 1], [key, key + 1])
        return out.cos()

    query, key = draw(1, 32, HEADS * GROUPS, SIZE), draw(1, 32, HEADS, SIZE, seed=1)
    made = []
    torch._dynamo.reset()  # programs that another test has made
    torch._dynamo.utils.counters.clear()
    for lengths in ((20, 12), (7, 9, 16), (5, 1, 6, 20), (9, 9, 5, 5, 4)):
        numbers = torch.arange(1, len(lengths) + 1)
        segments = numbers.repeat_interleave(torch.tensor(lengths))[None].int()
        attend = partial(attention.chained_attention, packing=Packing.of(batch_of(segments)))
        with compiling():
            found = part(query, key, attend)
        assert_same(found, part(query, key, attend), [query, key])
        made.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert made[0] > 0 and made[-1] == made[0]
