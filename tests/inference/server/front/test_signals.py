"""Signals end a server wherever its main thread happens to be."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from inference.server.front.signals import SIGNALS, ended_by_signals


class Dying:
    """Gets a signal in its destructor, where Python drops exceptions."""

    def __init__(self, number: signal.Signals) -> None:
        self.number = number

    def __del__(self) -> None:
        os.kill(os.getpid(), self.number)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_in_a_destructor_is_heard(number: signal.Signals) -> None:
    heard: list[int] = []
    before = signal.getsignal(number)
    with ended_by_signals(lambda: heard.append(1)):
        dying = Dying(number)
        del dying
        assert heard == [1]
    assert signal.getsignal(number) is before


def test_elsewhere_than_in_the_main_thread_nothing_is_changed() -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    found: list[object] = []

    def inside() -> None:
        with ended_by_signals(lambda: None):
            found.extend(signal.getsignal(number) for number in SIGNALS)

    thread = threading.Thread(target=inside)
    thread.start()
    thread.join()
    assert found == before
