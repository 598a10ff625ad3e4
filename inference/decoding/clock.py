"""Where the seconds of decoding go, phase by phase."""

from __future__ import annotations

import time

import torch

PHASES = ("prefill", "draft", "verify", "commit", "other")


class StepClock:
    """Seconds spent per phase.

    On CUDA each phase boundary synchronises, so that the split is true, unless `running_free`: then
    steps are neither split nor waited for, and the time between two reads of the host is shared out
    by `split`, the shares that synchronised steps had.
    """

    def __init__(self, device: torch.device, enabled: bool = True) -> None:
        self._synchronise = device.type == "cuda" and enabled
        self.running_free = False
        self.split: dict[str, float] | None = None
        self.reset()

    def reset(self) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.passes = 0
        self._last = time.perf_counter()

    def start(self) -> None:
        """Forget the time since the last mark (it belongs to no phase)."""
        self._wait()
        self._last = time.perf_counter()

    def mark(self, phase: str) -> None:
        """Book the time since the last mark to `phase`."""
        self._wait()
        now = time.perf_counter()
        self.seconds[phase] += now - self._last
        self._last = now

    def share_out(self) -> None:
        """Book the time since the last mark to the phases of a step, in the shares of `split`."""
        now = time.perf_counter()
        for phase, share in (self.split or {"other": 1.0}).items():
            self.seconds[phase] += (now - self._last) * share
        self._last = now

    def _wait(self) -> None:
        if self._synchronise and not self.running_free:
            torch.cuda.synchronize()

    @property
    def decode_seconds(self) -> float:
        """All seconds but prefill."""
        return sum(value for phase, value in self.seconds.items() if phase != "prefill")
