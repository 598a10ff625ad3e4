"""Waiting for what another thread or process does, with an end."""

from __future__ import annotations

import time
from collections.abc import Callable


def until(ready: Callable[[], object], seconds: float = 60.0) -> None:
    """Wait until `ready()` is true; fails after so many seconds."""
    end = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < end, f"not so within {seconds:g} s"
        time.sleep(0.01)
