"""The step loader: the same rows for any number of processes, every row once per epoch, any step
without the ones before."""

from __future__ import annotations

import re

import pytest
import torch

from heads.api.batch import TrainBatch
from heads.api.errors import UserError
from train.data.loader import StepLoader
from train.data.pack import PackedData
from train.data.permute import stable_permutation


@pytest.fixture(scope="module")
def data():
    """Eleven rows of eight positions; row r is filled by one document that starts with token r."""
    return PackedData([([row, *range(50, 57)], [(8 - 1 - row % 5, 8)]) for row in range(11)], 8)


def first_tokens(batches):
    return [batch.tokens[:, 0].tolist() for batch in batches]


@pytest.mark.parametrize(("world", "micro"), [(1, 1), (1, 4), (2, 2), (4, 1), (2, 1)])
def test_union_over_processes_is_the_same_for_any_world_size(data, world, micro):
    alone = StepLoader(data, 4, 4, 1, 0, seed=3)
    for step in range(8):
        rows = []
        for rank in range(world):
            batches = StepLoader(data, 4, micro, world, rank, seed=3).step(step)
            assert len(batches) == 4 // (world * micro)
            rows += [token for batch in first_tokens(batches) for token in batch]
        assert sorted(rows) == sorted(first_tokens(alone.step(step))[0])


def test_every_row_is_read_once_per_epoch_even_across_incomplete_steps(data):
    loader = StepLoader(data, 4, 4, 1, 0, seed=0)
    assert loader.steps_per_epoch == 3
    # 44 rows: four epochs exactly
    stream = [row for step in range(11) for row in loader.rows(step).tolist()]
    epochs = [stream[begin : begin + 11] for begin in range(0, 44, 11)]
    assert all(sorted(epoch) == list(range(11)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4


def test_a_step_is_a_function_of_seed_and_index_alone(data):
    walked = StepLoader(data, 4, 2, 1, 0, seed=1)
    for step in range(30):
        walked.step(step)
    fresh = StepLoader(data, 4, 2, 1, 0, seed=1)
    for step in (29, 0, 13):
        for one, two in zip(walked.step(step), fresh.step(step), strict=True):
            assert torch.equal(one.tokens, two.tokens)
            assert torch.equal(one.loss_mask, two.loss_mask)
    other = StepLoader(data, 4, 2, 1, 0, seed=2)
    assert any(walked.rows(s).tolist() != other.rows(s).tolist() for s in range(3))


def test_supervised_counts_the_whole_global_step(data):
    loaders = [StepLoader(data, 4, 1, 2, rank, seed=5) for rank in range(2)]
    for step in range(6):
        counted = sum(
            int(batch.loss_mask.sum()) for loader in loaders for batch in loader.step(step)
        )
        assert loaders[0].supervised(step) == loaders[1].supervised(step) == counted > 0


def test_a_global_batch_larger_than_the_data_wraps(data):
    loader = StepLoader(data, 32, 8, 2, 1, seed=0)
    assert loader.steps_per_epoch == 1
    rows = loader.rows(0).tolist()
    assert sorted(rows[:11]) == sorted(rows[11:22]) == list(range(11))


def test_batches_fit_a_train_batch(data):
    batch = StepLoader(data, 2, 2, 1, 0, seed=0).step(0)[0].to("cpu")
    assert (batch.tokens.dtype, batch.positions.dtype) == (torch.int64, torch.int64)
    assert (batch.segments.dtype, batch.loss_mask.dtype) == (torch.int32, torch.bool)
    train = TrainBatch(batch.tokens, batch.positions, batch.segments, batch.loss_mask)
    assert train.supervised(1)[:, :-1].equal(batch.loss_mask[:, 1:])


def test_prefetching_gives_the_same_steps_and_measures_waiting(data):
    loader = StepLoader(data, 4, 2, 1, 0, seed=7)
    seen = {index: first_tokens(batches) for index, batches in loader.iterate(2, 9)}
    assert seen == {index: first_tokens(loader.step(index)) for index in range(2, 9)}
    assert loader.wait_seconds > 0
    assert list(loader.iterate(5, 5)) == []


@pytest.mark.parametrize(("total", "micro", "world"), [(6, 4, 1), (4, 1, 3), (0, 1, 1), (4, 0, 1)])
def test_batches_that_cannot_be_dealt_are_refused(data, total, micro, world):
    with pytest.raises(UserError, match="cannot be dealt"):
        StepLoader(data, total, micro, world, 0, seed=0)


@pytest.mark.parametrize(
    ("total", "micro", "world", "words"),
    [
        (2, 2, 2, "train.global_batch=4 or train.micro_batch=1"),
        (16, 4, 8, "train.global_batch=32 or train.micro_batch=2"),
        (5, 2, 3, "train.global_batch=6"),
    ],
)
def test_the_refusal_names_settings_that_work(data, total, micro, world, words):
    with pytest.raises(UserError, match=re.escape(f"Set {words}.")):
        StepLoader(data, total, micro, world, 0, seed=0)
    changed = dict(item.removeprefix("train.").split("=") for item in words.split(" or ")[:1])
    StepLoader(data, int(changed["global_batch"]), micro, world, 0, seed=0)


def test_permutations_never_change():
    assert stable_permutation(8, seed=1, stream=2).tolist() == [2, 7, 3, 1, 5, 6, 0, 4]
    assert sorted(stable_permutation(1000, 5).tolist()) == list(range(1000))
    assert len({tuple(stable_permutation(20, s, e)) for s in range(5) for e in range(5)}) == 25
