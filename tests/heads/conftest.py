"""The micro target that tests of drafters share."""

from __future__ import annotations

import pytest

from tests.heads.micro import MicroTarget, micro_target


@pytest.fixture(scope="module")
def target() -> MicroTarget:
    """The random target of `micro_target`, once per file."""
    return micro_target()
