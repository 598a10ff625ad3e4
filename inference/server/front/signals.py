"""Signals that end a server in order."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""Ctrl-C, and what service managers and schedulers send."""


@contextmanager
def ended_by_signals(end: Callable[[], None]) -> Iterator[None]:
    """Within, each of `SIGNALS` calls `end`, which must return at once.

    Not an exception: it would be raised wherever the main thread happens to be, and Python drops
    those that are raised in a destructor or in a callback of C. Outside of the main thread Python
    delivers no signals; nothing is changed there.
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
