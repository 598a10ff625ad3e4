"""The small target that all tests of exports share."""

from __future__ import annotations

from pathlib import Path

import pytest

from inference.target.model import TargetModel
from tests.inference.export.ground import load_target, save_target


@pytest.fixture(scope="session")
def exported_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("served") / "target")


@pytest.fixture(scope="session")
def target(exported_target: Path) -> TargetModel:
    return load_target(exported_target)
