"""Stopping a run from outside: after SIGTERM (a scheduler), SIGUSR1 (SLURM, --signal=USR1@seconds)
or SIGINT (Ctrl-C), the run completes the step, saves its state and exits in good order."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class Stopped(SystemExit):
    """The run has saved its state as asked. Exit status 0 after a scheduler's signal, 130 after
    Ctrl-C."""

    def __init__(self, name: str, step: int) -> None:
        super().__init__(130 if name == signal.SIGINT.name else 0)
        self.name, self.step = name, step


class Interrupted(BaseException):
    """A signal came during work that is repeated later instead of being completed first."""


class StopRequest:
    """Records a signal instead of ending the process; a second Ctrl-C interrupts at once. Outside
    the main thread, where Python delivers no signals, it changes nothing."""

    def __init__(self) -> None:
        self.number = 0
        self._at_once = False
        self._before: dict[signal.Signals, Any] = {}

    @property
    def name(self) -> str:
        """The name of the signal that came; empty if none has."""
        return signal.Signals(self.number).name if self.number else ""

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def interrupting(self) -> Iterator[None]:
        """Within this context a signal, also an earlier one, raises `Interrupted` at once: a
        measurement may take longer than the time that a scheduler gives."""
        self._at_once = True
        try:
            if self.number:
                raise Interrupted
            yield
        finally:
            self._at_once = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.number and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.number = number
        if self._at_once:
            raise Interrupted
