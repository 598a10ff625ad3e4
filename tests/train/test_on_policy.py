"""Answers continued by the drafter: where they are cut, what is written, what the target says about
it, and who is refused."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from heads.api.batch import TrainBatch
from heads.api.checkpoint import new_drafter
from heads.api.drafter import TrainableDrafter
from heads.api.errors import UserError
from heads.api.registry import get_kind
from heads.dflash import Config as DFlashConfig
from tests.heads.micro import MicroTarget, micro_target
from tests.train.micro_run import settings
from train.data.loader import PackedBatch
from train.engines.base import EngineConfig
from train.features.base import OnlineFeatures
from train.on_policy import OnPolicyConfig, OnPolicyFeatures, plan_cuts, require_possible
from train.run import train
from train.tracking.tracker import LOG_FILE, read_log

DOCUMENTS = [
    [5, 9, 3, 22, 17, 4, 8, 30, 11, 2, 6, 19, 21],
    [7, 7, 1, 40, 3, 12, 13, 14, 15],
    [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11],
    [31, 32, 33, 34, 35, 36, 37, 38],
]
ROWS = [[0, 1], [2], [3, 0]]
PROMPT = 3
TORCH = EngineConfig(name="torch")


def packed(seeds: tuple[int, ...] = (4, 5, 6), rows: list[list[int]] = ROWS) -> PackedBatch:
    """Rows of documents, the first PROMPT tokens of each not supervised."""
    width = max(sum(len(DOCUMENTS[number]) for number in row) for row in rows)
    shape = (len(rows), width)
    tokens, positions = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)
    segments, mask = torch.zeros(shape, dtype=torch.int32), torch.zeros(shape, dtype=torch.bool)
    for index, row in enumerate(rows):
        first = 0
        for number, document in enumerate(DOCUMENTS[i] for i in row):
            span = slice(first, first + len(document))
            tokens[index, span], positions[index, span] = (
                torch.tensor(document),
                torch.arange(len(document)),
            )
            segments[index, span] = number + 1
            mask[index, first + PROMPT : first + len(document)] = True
            first += len(document)
    return PackedBatch(tokens, positions, segments, mask, torch.tensor(seeds))


@pytest.fixture(scope="module")
def target() -> MicroTarget:
    return micro_target()


def make(target: MicroTarget, kind: str = "distilled", **options: Any) -> TrainableDrafter:
    config = get_kind(kind).config_class(**options)
    return new_drafter(
        kind, config, target.info, target.weights, 0, torch.arange(target.info.vocab_size)
    ).train()


def rewriting(
    target: MicroTarget, drafter: TrainableDrafter, eos: tuple[int, ...] = (), **options: Any
) -> OnPolicyFeatures:
    config = OnPolicyConfig(**{"share": 1.0, "window": 4, **options})
    plain = OnlineFeatures(target, drafter.needs, torch.float64)
    return OnPolicyFeatures(plain, drafter, eos, config, TORCH)


# Where


def test_cuts_lie_in_answers_and_follow_the_seeds() -> None:
    config = OnPolicyConfig(share=1.0, window=4)
    found = set()
    for seed in range(200):
        batch = packed((seed, seed + 1000, seed + 2000))
        cuts = plan_cuts(batch, config)
        assert cuts == plan_cuts(batch, config)
        assert len(cuts) == 5
        for cut in cuts:
            assert bool(
                (
                    batch.segments[cut.row, cut.first : cut.end]
                    == batch.segments[cut.row, cut.first]
                ).all()
            )
            assert cut.first + PROMPT - 1 <= cut.last < cut.end - 1
            assert cut.room == min(4, cut.end - 1 - cut.last)
            found.add((cut.row, cut.first, cut.last))
        shifted = plan_cuts(packed((seed + 1000, seed, 1)), config)
        pairs = (
            [(c.last, c.seed) for c in cuts if c.row == 1],
            [(c.last, c.seed) for c in shifted if c.row == 0],
        )
        assert pairs[0][0][1] == pairs[1][0][1] or pairs[0][0][0] != pairs[1][0][0]
    assert found == {
        (row, first, last)
        for row, numbers in enumerate(ROWS)
        for first, length in zip(
            (0, len(DOCUMENTS[numbers[0]])), (len(DOCUMENTS[n]) for n in numbers), strict=False
        )
        for last in range(first + PROMPT - 1, first + length - 1)
    }, "every place of an answer must be reached"


def test_a_window_ends_where_the_answer_does() -> None:
    """Several turns in one document: what the user said is neither replaced nor written over."""
    batch = packed()
    batch.loss_mask[0, 6:9] = False
    for seed in range(60):
        batch.seeds[:] = seed
        cut = plan_cuts(batch, OnPolicyConfig(share=1.0, window=9))[0]
        replaced = range(cut.last + 1, cut.last + 1 + cut.room)
        assert all(bool(batch.loss_mask[0, place]) for place in replaced)
        assert cut.last + 1 + cut.room in (6, 13)


def test_the_share_is_the_share_of_rows() -> None:
    hits = sum(
        bool(plan_cuts(packed((seed,), [[0]]), OnPolicyConfig(share=0.3))) for seed in range(600)
    )
    assert 0.22 < hits / 600 < 0.38


# What


def test_the_rest_stays_supervised_on_request(target: MicroTarget) -> None:
    """But never behind an end of text."""
    drafter, batch = make(target, num_layers=1), packed()
    without, with_rest = (
        rewriting(target, drafter, rest=rest).batch(batch) for rest in (False, True)
    )
    assert torch.equal(without.tokens, with_rest.tokens)
    assert torch.equal(with_rest.loss_mask, batch.loss_mask)
    assert int(without.loss_mask.sum()) < int(batch.loss_mask.sum())
    cut = plan_cuts(batch, OnPolicyConfig(share=1.0, window=4))[0]
    end = int(without.tokens[cut.row, cut.last + 1])
    found = rewriting(target, drafter, eos=(end,), rest=True).batch(batch)
    assert not bool(found.loss_mask[cut.row, cut.last + 2 : cut.end].any())


@pytest.mark.parametrize("kind", ["distilled", "pard"])
def test_the_drafter_writes_and_the_target_judges(target: MicroTarget, kind: str) -> None:
    """At temperature 0 against an obvious loop; everything behind the window loses its supervision,
    nothing else changes."""
    drafter = make(target, kind, num_layers=1)
    batch = packed()
    found = rewriting(target, drafter, temperature=0.0).batch(batch)
    plain = OnlineFeatures(target, drafter.needs, torch.float64).batch(batch)
    tokens, mask = batch.tokens.clone(), batch.loss_mask.clone()
    for cut in plan_cuts(batch, OnPolicyConfig(share=1.0, window=4)):
        text = batch.tokens[cut.row, cut.first : cut.last + 1].tolist()
        known = len(text)
        for _ in range(cut.room):
            mask_tokens = (
                [int(drafter.pard_token)] * (len(text) - known) if kind == "pard" else text[known:]
            )
            alone = replace(
                plain,
                tokens=torch.tensor([text[:known] + mask_tokens]),
                positions=torch.arange(len(text))[None],
                segments=torch.ones(1, len(text), dtype=torch.int32),
            )
            text.append(int(drafter.logits(drafter.sequence(alone))[0, -1].argmax()))
        tokens[cut.row, cut.last + 1 : cut.last + 1 + cut.room] = torch.tensor(text[known:])
        mask[cut.row, cut.last + 1 + cut.room : cut.end] = False
    assert torch.equal(found.tokens, tokens) and torch.equal(found.loss_mask, mask)
    assert not torch.equal(tokens, batch.tokens)
    _, expected = target.features(tokens, batch.positions, batch.segments, drafter.needs)
    torch.testing.assert_close(found.last_hidden, expected)
    assert torch.equal(found.positions, batch.positions) and torch.equal(found.seeds, batch.seeds)
    assert drafter.training
    assert float(drafter.loss(found).loss_sum.detach()) > 0


def test_new_text_does_not_keep_the_weights_of_the_old(target: MicroTarget) -> None:
    """Nor do the drafts from the root on, whether or not the rest stays supervised."""
    drafter, batch = make(target, num_layers=1), packed((1, 2, 3))
    batch = replace(
        batch,
        weights=torch.full(batch.tokens.shape, 2.0),
        anchors=torch.full(batch.tokens.shape, 3.0),
    )
    features = rewriting(target, drafter, share=0.5, rest=True)
    cuts, found = plan_cuts(batch, features.config), features.batch(batch)
    weights, anchors = batch.weights.clone(), batch.anchors.clone()
    for cut in cuts:
        weights[cut.row, cut.last + 1 : cut.last + 1 + cut.room] = 1.0
        anchors[cut.row, cut.last : cut.end] = 1.0
    assert 0 < len({cut.row for cut in cuts}) < 3, "other seeds are needed for this test"
    assert torch.equal(found.weights, weights) and torch.equal(found.anchors, anchors)
    assert bool((batch.anchors == 3.0).all()), "the loader's own tensors stay as they are"


def test_rows_that_are_not_drawn_stay_as_they_are(target: MicroTarget) -> None:
    drafter = make(target, num_layers=1)
    batch = packed((1, 2, 3))
    features = rewriting(target, drafter, share=0.5)
    drawn = {cut.row for cut in plan_cuts(batch, features.config)}
    assert 0 < len(drawn) < 3, "other seeds are needed for this test"
    found, plain = features.batch(batch), features.plain.batch(batch)
    for row in range(3):
        assert torch.equal(found.tokens[row], batch.tokens[row]) is (row not in drawn)
        assert torch.equal(found.last_hidden[row], plain.last_hidden[row]) is (row not in drawn)


def test_samples_follow_the_drafters_distribution(target: MicroTarget) -> None:
    """The first word behind one and the same cut, over many seeds: total variation from softmax as
    small as chance allows."""
    drafter = make(target, num_layers=1)
    batch = packed(tuple(range(3000)), [[3]] * 3000)
    features = rewriting(target, drafter, window=1, temperature=0.7)
    found = TrainBatch(
        batch.tokens, batch.positions, batch.segments, batch.loss_mask
    )  # it reads tokens alone
    last = PROMPT + 1
    cuts = [cut for cut in plan_cuts(batch, features.config) if cut.last == last]
    words = features._continue(found, cuts)[:, 0]
    shares = torch.bincount(words, minlength=41) / words.shape[0]
    alone = replace(
        found,
        **{
            name: getattr(packed((0,), [[3]]), name)[:, : last + 1]
            for name in ("tokens", "positions", "segments")
        },
    )
    expected = (drafter.logits(drafter.sequence(alone))[0, -1] / 0.7).softmax(-1)
    chance = (expected * (1 - expected) / words.shape[0]).sqrt().sum() * 0.8 / 2
    assert words.shape[0] > 300
    assert 0.5 * (shares - expected).abs().sum() < 2 * chance
    assert 0.5 * (shares - 1 / 41).abs().sum() > 2 * chance, "a flat distribution would have passed"


def test_nothing_counts_behind_the_end_of_text(target: MicroTarget) -> None:
    drafter = make(target, num_layers=1)
    batch = packed()
    first = rewriting(target, drafter).batch(batch)
    cut = plan_cuts(batch, OnPolicyConfig(share=1.0, window=4))[0]
    assert cut.room > 1
    end = int(first.tokens[cut.row, cut.last + 1])
    found = rewriting(target, drafter, eos=(end,)).batch(batch)
    assert int(found.tokens[cut.row, cut.last + 1]) == end
    assert found.loss_mask[cut.row, cut.last + 1 : cut.end].tolist() == [True] + [False] * (
        cut.end - cut.last - 2
    )
    assert torch.equal(
        found.tokens[cut.row, cut.last + 2 : cut.end], batch.tokens[cut.row, cut.last + 2 : cut.end]
    )


def test_kinds_that_read_the_targets_states_can_be_trained_like_this(target: MicroTarget) -> None:
    drafter = make(target, "eagle3", ttt_steps=2)
    found = rewriting(target, drafter).batch(packed())
    assert not torch.equal(found.tokens, packed().tokens)
    taps, _ = target.features(found.tokens, found.positions, found.segments, drafter.needs)
    torch.testing.assert_close(found.taps, taps)
    assert float(drafter.loss(found).loss_sum.detach()) > 0


@pytest.mark.parametrize(
    ("kind", "options", "longest"),
    [
        ("dflash", {"block_size": 5}, 4),
        ("mtp", {"depths": 2}, 2),
        ("mtp", {"depths": 2, "shared": True}, 9),
        ("eagle3", {}, 9),
    ],
)
def test_a_window_beyond_a_kinds_largest_depth_is_written_to_that_depth(
    target: MicroTarget, kind: str, options: dict[str, Any], longest: int
) -> None:
    features = rewriting(target, make(target, kind, **options), window=9)
    assert features.tree.max_depth == longest
    assert not torch.equal(features.batch(packed()).tokens, packed().tokens)


def test_only_some_steps_have_it(target: MicroTarget) -> None:
    drafter, batch = make(target, num_layers=1), packed()
    features = rewriting(target, drafter, every=3, start=2)
    changed = [
        step
        for step in range(9)
        if not torch.equal(features.batch(batch, step).tokens, batch.tokens)
    ]
    assert changed == [2, 5, 8]


# In a training


def run(micro: Path, out: Path, **options: Any) -> None:
    on_policy = OnPolicyConfig(**{"share": 0.5, "window": 6, **options})
    train(
        out=out,
        **settings(
            micro, kind="distilled", head={"num_layers": 1}, max_steps=8, on_policy=on_policy
        ),
    )


def test_a_steps_loss_is_divided_by_what_is_supervised_after_the_rewriting(
    micro: Path, tmp_path: Path, divisors: list[tuple[int, int]]
) -> None:
    run(micro, tmp_path / "out", share=1.0)
    assert len(divisors) == 16  # two micro-batches to a step
    for (one, divisor), (other, same) in zip(divisors[::2], divisors[1::2], strict=True):
        assert divisor == same == one + other
    assert len({divisor for _, divisor in divisors}) > 1


def test_half_and_half_is_the_whole(
    micro: Path, tmp_path: Path, stopping: AbstractContextManager[None]
) -> None:
    run(micro, tmp_path / "whole")
    with stopping:
        run(micro, tmp_path / "halves")
    torch.rand(7)
    run(micro, tmp_path / "halves")
    run(micro, tmp_path / "other", share=0.0)
    weights = [
        load_file(tmp_path / name / "best" / "model.safetensors")
        for name in ("whole", "halves", "other")
    ]
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
    assert not all(torch.equal(value, weights[2][name]) for name, value in weights[0].items())
    losses = [
        [line["loss"] for line in read_log(tmp_path / name / LOG_FILE) if "loss" in line]
        for name in ("whole", "halves")
    ]
    assert losses[0] == losses[1] and len(losses[0]) == 8


def test_what_cannot_be_is_refused(target: MicroTarget) -> None:
    with pytest.raises(UserError, match=r"taught its own mistakes.*train\.on_policy\.share=0"):
        rewriting(target, make(target, forward_kl=0.0, ce=1.0))
    with pytest.raises(UserError, match=r"head\.ce takes tokens as labels"):
        rewriting(target, make(target, ce=0.1))
    for values, named in (
        ({"ce": 0.1}, "ce"),
        ({"dependency": "selector", "dependency_rank": 4}, "dependency"),
        ({"dependency": "lilicorr", "dependency_rank": 4}, "dependency"),
        ({"depth_weights": "d_pace"}, "depth_weights"),
    ):
        block = get_kind("dflash").drafter_class(DFlashConfig(**values), target.info)
        with pytest.raises(UserError, match=rf"head\.{named} takes tokens as labels"):
            require_possible(block, EngineConfig())
    require_possible(get_kind("dflash").drafter_class(DFlashConfig(), target.info), EngineConfig())
    drafter = make(target)
    plain = OnlineFeatures(target, drafter.needs)
    with pytest.raises(UserError, match="zero_stage=3"):
        OnPolicyFeatures(plain, drafter, (), OnPolicyConfig(share=0.5), EngineConfig(zero_stage=3))
    for options in (
        {"share": 1.5},
        {"window": 0},
        {"every": 0},
        {"start": -1},
        {"temperature": -1.0},
    ):
        with pytest.raises(UserError, match=r"train\.on_policy\."):
            OnPolicyConfig(**options)
