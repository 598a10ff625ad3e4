"""PARD: masks see what they see when serving, conditional drop, one pass per draft, and what it
starts from."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from heads.api.batch import TrainBatch
from heads.api.checkpoint import load_drafter, new_drafter, save_drafter
from heads.api.errors import UserError
from heads.api.tree import TokenTree
from heads.distilled import Config as DistilledConfig
from heads.nn import losses
from heads.nn.feature.masks import Masks
from heads.pard import Config, Drafter
from tests.heads.explicit import DOCUMENTS
from tests.heads.micro import MicroTarget, PlainNoise, packed_batch, seen_states


def make(target: MicroTarget, counts: Tensor | None = None, **options: object) -> Drafter:
    return new_drafter("pard", Config(**options), target.info, target.weights, 0, counts).eval()


def slow(
    drafter: Drafter, target: MicroTarget, document: list[int], place: int, step: int
) -> Tensor:
    """The normalised state [H] of mask `step` behind `place`, by writing the masks into the text
    itself."""
    text = [*document[: place + 1], *[int(drafter.pard_token)] * step]
    return drafter.sequence(packed_batch(target, drafter.needs, [[text]]))[0, -1]


@torch.no_grad()
def test_masks_see_their_past_and_the_masks_before_them(target: MicroTarget) -> None:
    """Two documents packed into one row, every place, three deep: the same as masks written into
    the text."""
    drafter = make(target)
    batch = packed_batch(target, drafter.needs, [DOCUMENTS[:2], DOCUMENTS[2:]])
    outputs = drafter._outputs(batch, Masks.everywhere(batch.tokens, 3))
    length, compared = batch.tokens.shape[1], 0
    for row, documents in enumerate((DOCUMENTS[:2], DOCUMENTS[2:])):
        first = 0
        for document in documents:
            for place in range(len(document)):
                for step in range(1, 4):
                    found = outputs[row, length + 3 * (first + place) + step - 1]
                    torch.testing.assert_close(found, slow(drafter, target, document, place, step))
                    compared += 1
            first += len(document)
    assert compared == 3 * sum(map(len, DOCUMENTS))


def test_the_true_tokens_never_see_a_mask(target: MicroTarget) -> None:
    drafter = make(target)
    batch = packed_batch(target, drafter.needs, [DOCUMENTS[:2], DOCUMENTS[2:]])
    outputs = drafter._outputs(batch, Masks.everywhere(batch.tokens, 2))
    torch.testing.assert_close(outputs[:, : batch.tokens.shape[1]], drafter.sequence(batch))


@pytest.mark.parametrize(
    "options", [{"keep": 1.0, "keep_least": 1.0}, {"keep": 0.6, "keep_least": 0.3}]
)
def test_loss_is_the_sum_over_text_and_kept_masks(
    target: MicroTarget, options: dict[str, float]
) -> None:
    drafter = make(target, depth=4, jsd=0.5, **options)
    batch = packed_batch(target, drafter.needs, [DOCUMENTS[:2], DOCUMENTS[2:]])
    batch.seeds = torch.tensor([3, 4])
    masks = Masks.sample(batch, 4, options["keep"], options["keep_least"])
    total, counts = torch.zeros((), dtype=torch.float64), [0, 0, 0, 0]
    for row, documents in enumerate((DOCUMENTS[:2], DOCUMENTS[2:])):
        first = 0
        for document in documents:
            teacher = target.model(torch.tensor([document])).logits[0]
            here = {(t, 0) for t in range(len(document))}
            pairs = zip(
                masks.place[row].tolist(),
                masks.step[row].tolist(),
                masks.valid[row].tolist(),
                strict=True,
            )
            here |= {
                (t - first, k)
                for t, k, valid in pairs
                if valid and first <= t < first + len(document)
            }
            for place, step in here:
                ahead = place + step + 1
                if ahead >= len(document) or ahead < 2:  # the first two tokens are the prompt
                    continue
                logits = drafter.logits(slow(drafter, target, document, place, step))[None]
                wanted = teacher[ahead - 1][None]
                total = total + losses.forward_kl(logits, wanted)[0]
                total = total + 0.5 * losses.jensen_shannon(logits, wanted, 0.5)[0]
                counts[step] += 1
            first += len(document)
    output = drafter.loss(batch)
    torch.testing.assert_close(output.loss_sum, total)
    assert [int(output.metrics[f"loss/depth{k}"][1]) for k in range(1, 5)] == counts
    assert min(counts) > 0


def long_batch(rows: int = 2, length: int = 400) -> TrainBatch:
    tokens = torch.zeros(rows, length, dtype=torch.int64)
    segments = torch.ones(rows, length, dtype=torch.int32)
    segments[:, length // 2 :] = 2
    mask = torch.ones(rows, length, dtype=torch.bool)
    mask[:, :30] = False
    return TrainBatch(
        tokens, torch.arange(length).expand(rows, -1), segments, mask, seeds=torch.arange(rows) + 5
    )


def test_conditional_drop_keeps_nested_shares_and_follows_the_seeds() -> None:
    batch = long_batch()
    masks = Masks.sample(batch, 6, 0.7, 0.3)
    for row in range(2):
        valid = masks.valid[row]
        place, step = masks.place[row][valid], masks.step[row][valid]
        by_step = [set(place[step == k].tolist()) for k in range(1, 6)]
        assert all(deeper <= above for above, deeper in itertools.pairwise(by_step))
        eligible = 398 - 30 + 6  # a token ahead in the document, and a supervised one within reach
        for k, places in enumerate(by_step, 1):
            kept = math.ceil(max(0.7**k, 0.3) * eligible)
            # less at the ends of documents
            assert kept - 6 - 2 * k <= len(places) <= kept, (k, len(places))
        assert bool(masks.supervised(batch)[row][valid].float().mean() > 0.9)
        assert place.max() < 399 and not any(
            t in (198, 199) and k > 0 for t, k in zip(place, step, strict=True)
        )
    again = Masks.sample(batch, 6, 0.7, 0.3)
    assert torch.equal(masks.place, again.place) and torch.equal(masks.step, again.step)
    assert masks.place[0].tolist() != masks.place[1].tolist()
    batch.seeds = torch.tensor([6, 5])
    swapped = Masks.sample(batch, 6, 0.7, 0.3)
    assert torch.equal(swapped.place[[1, 0]], masks.place)


def test_no_mask_stands_where_nothing_deeper_is_supervised() -> None:
    batch = long_batch(rows=1)
    masks = Masks.sample(batch, 8, 1.0, 1.0)
    supervised = masks.supervised(batch)[0].tolist()
    pairs = list(zip(masks.place[0].tolist(), masks.step[0].tolist(), supervised, strict=True))
    deepest = {place: max(k for p, k, _ in pairs if p == place) for place, _, _ in pairs}
    assert all(right for place, k, right in pairs if k == deepest[place])
    assert not all(supervised), (
        "masks in front of the answer carry the chain of those that are in it"
    )


@torch.no_grad()
def test_drafting_is_one_pass_over_the_text_and_its_masks(target: MicroTarget) -> None:
    """Deeper than it was trained for, ragged, after a commit: every depth's token is that of masks
    written into the text."""
    drafter = make(target, from_target_layers=(0, 2), depth=3)
    seen = seen_states(target, drafter.needs, DOCUMENTS[:2], [(0, 8), (0, 4)])
    state = drafter.start(seen, TokenTree.chain(6), 32)
    state = drafter.commit(
        state, seen_states(target, drafter.needs, DOCUMENTS[:2], [(8, 9), (4, 7)])
    )
    found = drafter.logits(state.output)
    tokens = drafter.propose(state, PlainNoise()).tokens
    for row, root in ((0, 9), (1, 7)):
        for step in range(6):
            expected = drafter.logits(slow(drafter, target, DOCUMENTS[row], root, step))
            torch.testing.assert_close(found[row, step], expected)
            assert int(tokens[row, 1 + step]) == int(expected.argmax())


def test_the_rarest_token_is_the_mask(target: MicroTarget, tmp_path: Path) -> None:
    counts = torch.full((41,), 5)
    counts[[7, 12]] = 0
    assert int(make(target, counts).pard_token) == 12
    assert int(make(target, counts, pard_token=3).pard_token) == 3
    drafter = make(target)
    assert int(drafter.pard_token) == 40
    drafter = make(target, counts)
    save_drafter(drafter, tmp_path, target.info)
    assert int(load_drafter(tmp_path, target.info, target.weights).pard_token) == 12
    for given in (-1, 12):
        again = make(target, torch.arange(41), from_model=str(tmp_path), pard_token=given)
        assert int(again.pard_token) == 12
    with pytest.raises(UserError, match=r"head\.pard_token is 33, .* trained with the mask 12"):
        make(target, from_model=str(tmp_path), pard_token=33)


@torch.no_grad()
def test_it_starts_from_a_distilled_drafter_and_back(target: MicroTarget, tmp_path: Path) -> None:
    first = new_drafter(
        "distilled", DistilledConfig(from_target_layers=(1, 3)), target.info, target.weights, 0
    )
    save_drafter(first, tmp_path / "distilled", target.info)
    second = make(target, from_model=str(tmp_path / "distilled"))
    batch = packed_batch(target, first.needs, [DOCUMENTS[:2]])
    torch.testing.assert_close(
        second.train_logits(batch, 1), first.train_logits(batch, 1), rtol=0, atol=0
    )
    save_drafter(second, tmp_path / "pard", target.info)
    third = new_drafter(
        "distilled",
        DistilledConfig(from_model=str(tmp_path / "pard")),
        target.info,
        target.weights,
        0,
    )
    assert all(
        torch.equal(value, third.state_dict()[name]) for name, value in first.state_dict().items()
    )
