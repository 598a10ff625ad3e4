"""What several readers share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.newcomer.environments import copy_of_the_repository, wheel_of
from tests.newcomer.reader import Reader, reader_in


@pytest.fixture
def reader(tmp_path: Path) -> Reader:
    """Somebody with an empty folder and this repository's `headstart`."""
    return reader_in(tmp_path)


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy: a build leaves folders in the sources."""
    source = copy_of_the_repository(tmp_path_factory.mktemp("source"))
    return wheel_of(source, tmp_path_factory.mktemp("dist"))
