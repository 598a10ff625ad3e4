"""Fixtures that tests of trainings share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from heads.api.batch import LossOutput, TrainBatch
from tests.train.micro_run import prepare
from train.engines.torch_engine import TorchEngine


@pytest.fixture(scope="module")
def micro(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a micro target, answers of its own, and prompts
    (`tests.train.micro_run.prepare`)."""
    return prepare(tmp_path_factory.mktemp("micro"))


@pytest.fixture
def one_thread() -> Iterator[None]:
    """One thread for torch, so that processes of one thread add up alike."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def divisors(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """For every micro-batch that is trained from here on: its supervised tokens, and the number by
    which its loss is divided."""
    seen: list[tuple[int, int]] = []
    plain = TorchEngine.forward_backward

    def noted(self: TorchEngine, batch: TrainBatch, supervised: int, last: bool) -> LossOutput:
        seen.append((int(batch.loss_mask.sum()), supervised))
        return plain(self, batch, supervised, last)

    monkeypatch.setattr(TorchEngine, "forward_backward", noted)
    return seen
