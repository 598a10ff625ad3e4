"""Handles a scheduler's signal outside of the loops that save: the process ends with status 0, and
the same command continues it.

No work is lost. Files that a stage writes before and after its loop appear complete under their
names or not at all, and are written again. The loops (`train.stopping`,
`train.processes.terminable`) have separate handlers, which save first.

Python calls a handler when the main thread returns from C. A main thread that waits for another
process, in a collective or for a connection, may never return, because the other process has
already ended. A separate thread is notified of the signal in any case and ends such a process.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
GRACE_SECONDS = 5.0
"""Seconds that the main thread has to end by itself."""
AGAIN_SECONDS = 0.05
"""Seconds after which a signal that arrived in a finaliser is sent again."""

Handler = Callable[[int, FrameType | None], None]


@contextmanager
def leave_in_order() -> Iterator[None]:
    """In this context, SIGTERM and SIGUSR1 print a line and raise `SystemExit` with status 0,
    unless another handler was installed.

    While the process ends with status 0, for a signal here or in a loop, further signals are
    ignored. Outside of the main thread, Python delivers no signals, and this context changes
    nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    leave = handler_of(os.getpid())
    hears, told = os.pipe()
    os.set_blocking(told, False)
    children_forget()
    before = {number: signal.signal(number, leave) for number in SIGNALS}
    told_before = signal.set_wakeup_fd(told, warn_on_full_buffer=False)
    threading.Thread(target=watch, args=(hears, leave), name="signals", daemon=True).start()
    after: dict[signal.Signals, Any] = before
    try:
        yield
    except SystemExit as leaving:
        if not leaving.code:
            after = dict.fromkeys(SIGNALS, signal.SIG_IGN)
        raise
    finally:
        for number, handler in after.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(told_before)
        os.close(told)


def handler_of(owner: int) -> Handler:
    """The reaction of process `owner` to a signal; children forked from it end by the signal
    itself."""

    def leave(number: int, frame: FrameType | None) -> None:
        """Raise `SystemExit` with status 0, after a line by the main process."""
        if os.getpid() != owner:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        if in_finaliser(frame):  # Python drops exceptions raised there; try again later
            again = threading.Timer(AGAIN_SECONDS, os.kill, (owner, number))
            again.daemon = True
            again.start()
            return
        for other in SIGNALS:
            signal.signal(other, signal.SIG_IGN)
        if os.environ.get("RANK", "0") in ("", "0"):
            name = signal.Signals(number).name
            line = f"nothing is lost; {continued_by(sys.argv)} continues where this one stopped."
            with suppress(OSError):
                # bypasses Python's own buffers, which the signal may have interrupted
                os.write(2, f"\nheadstart: {name}: {line}\n".encode())
        raise SystemExit(0)

    return leave


def continued_by(given: Sequence[str]) -> str:
    """The command that continues an interrupted one, in words. given: its arguments."""
    begins = any(item.lstrip("+").lower() == "run.overwrite=true" for item in given)
    return f"the same command{' without run.overwrite=true' if begins else ''}"


def in_finaliser(frame: FrameType | None) -> bool:
    """Whether an object's `__del__` is running at `frame`."""
    while frame is not None:
        if frame.f_code.co_name == "__del__":
            return True
        frame = frame.f_back
    return False


def watch(hears: int, leave: Handler) -> None:
    """End the process `GRACE_SECONDS` after a signal that `leave` handles."""
    # signals that the main thread blocks must stay pending for it
    signal.pthread_sigmask(signal.SIG_BLOCK, {*SIGNALS, signal.SIGINT})
    with os.fdopen(hears, "rb", buffering=0) as numbers:
        while number := numbers.read(1):
            if number[0] in SIGNALS and signal.getsignal(number[0]) in (leave, signal.SIG_IGN):
                time.sleep(GRACE_SECONDS)
                os._exit(0)


@cache
def children_forget() -> None:
    """Keep forked children from notifying their parent of their own signals."""
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
