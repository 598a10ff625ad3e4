"""Memory that a phase has freed goes back to the system, also from below what is still in use."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
from inference.server.metrics import resident_bytes
from train.memory import give_back_freed_memory
held = [bytes(2000) for _ in range(100_000)]
full = resident_bytes()
last = held[-1]  # keeps glibc from shrinking the heap by itself
del held
freed = resident_bytes()
give_back_freed_memory()
print(full - freed, freed - resident_bytes())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other C libraries decide for themselves")
def test_freed_memory_goes_back() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    alone, given_back = map(int, done.stdout.split())
    assert alone < 50e6, "nothing to show: the C library gave it back by itself"
    assert given_back > 150e6
