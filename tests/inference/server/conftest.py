"""The micro target and one server that most tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from heads.api.checkpoint import new_drafter
from heads.api.registry import get_kind
from inference.decoding.config import DecodeConfig
from inference.decoding.engine import Engine
from inference.target.loading import TargetConfig
from inference.target.model import TargetModel
from tests.inference.server.running import Running, serving
from tests.inference.tokenizers import save_micro_target


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetModel:
    """In float64: batches of any size give the same text."""
    folder = save_micro_target(tmp_path_factory.mktemp("micro"))
    return TargetModel.load(TargetConfig(str(folder), dtype="float64", device="cpu"))


@pytest.fixture(scope="session")
def engine(target: TargetModel) -> Engine:
    """Four rows and a random EAGLE-3 head."""
    drafter = new_drafter(
        "eagle3", get_kind("eagle3").config_class(), target.info, target.weights, 0
    )
    return Engine(target, drafter, DecodeConfig(batch_size=4, depth=3, max_new_tokens=40))


@pytest.fixture(scope="module")
def running(engine: Engine) -> Iterator[Running]:
    with serving(engine, token="a-token-for-the-tests") as found:
        yield found
