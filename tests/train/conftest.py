"""Fixtures that tests of trainings share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from heads.api.batch import LossOutput, TrainBatch
from inference.target.loading import TargetConfig
from inference.target.model import TargetModel
from tests.train.micro_run import prepare
from train.engines.torch_engine import TorchEngine
from train.loop import Trainer
from train.stopping import Stopped


@pytest.fixture(scope="module")
def micro(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a micro target, answers of its own, and prompts
    (`tests.train.micro_run.prepare`)."""
    return prepare(tmp_path_factory.mktemp("micro"))


@pytest.fixture(scope="module")
def target(micro: Path) -> TargetModel:
    return TargetModel.load(TargetConfig(str(micro / "target"), device="cpu"))


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


@contextmanager
def stop_in_the_middle(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Trainings within stop behind the step of index 4; one of them must."""
    plain = Trainer.step

    def step(self: Trainer, index: int, *rest: Any) -> bool:
        return plain(self, index, *rest) or index == 4

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", step)
        with pytest.raises(Stopped):
            yield


@pytest.fixture
def stopping(monkeypatch: pytest.MonkeyPatch) -> AbstractContextManager[None]:
    """A context that expects its training to stop: see `stop_in_the_middle`."""
    return stop_in_the_middle(monkeypatch)
