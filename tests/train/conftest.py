"""Fixtures that tests of trainings share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.train.micro_run import prepare


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
