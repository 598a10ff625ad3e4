"""Signals that end a server gracefully."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""Ctrl-C, and the signals of service managers and schedulers."""


@contextmanager
def ended_by_signals(end: Callable[[], None]) -> Iterator[None]:
    """Within the block, each of `SIGNALS` calls `end`, which must return at once.

    The handler raises no exception: it would be raised at an arbitrary place of the main thread,
    and Python drops exceptions that are raised in a destructor or in a callback of C. Python
    delivers no signals to other threads, so there the block changes nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: FrameType | None) -> None:
        end()

    before = {number: signal.signal(number, handle) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
