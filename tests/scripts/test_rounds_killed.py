"""`kill -9` at random points of a loop of rounds: repeated, it ends like one that was left in peace."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.loop_kill import kill_and_compare
from tests.scripts.loops import micro_loop


@pytest.mark.slow
def test_a_loop_that_is_killed_ten_times_ends_the_same(tmp_path: Path) -> None:
    found = kill_and_compare(micro_loop(tmp_path), tmp_path, kills=10)
    assert found["kills"] == 10, found
    assert found["same_weights"] and found["same_summary"], found
    assert found["rounds"] == 3
