"""The seconds of decoding, by phase."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from heads.api.errors import UserError
from heads.kernels.dispatch import choose
from inference.kernels.reference.device_clock import WRITE_CLOCK
from inference.target.hardware import wait_for

PHASES = ("prefill", "draft", "verify", "commit", "other")
BORDERS = ("", "draft", "verify", "other", "commit")
"""The phase that ends at each of a step's clock readings, in order; "": the step begins."""
AGREEMENT, SHORTEST = 0.03, 0.1
"""The largest difference of the device's seconds from the host's, as a share of the host's, and the
fewest host seconds for which the two are compared."""


@dataclass
class AheadTally:
    """What drafting ahead saved (`decode.ahead`).

    drafts: those that were verified; kept: how many of them were made ahead; hidden: the seconds of
    making these that passed while the target verified, and so are part of no phase.
    """

    drafts: int = 0
    kept: int = 0
    hidden: float = 0.0


class StepClock:
    """Seconds spent per phase.

    Work that runs in parallel with a phase is not part of it: phases add up to the elapsed time.
    Drafting ahead is counted separately (`ahead`); waiting for it is "commit".

    On a CPU the host marks the end of every phase. On an accelerator it launches steps ahead and
    knows only when their results arrive. There a step writes the device's clock to `times` at the
    borders of its phases. The times are returned with the step's result, and `book` counts them
    when the host reads it. The device's seconds between two steps count as "other". The host's
    seconds during which steps were under way are counted separately (`waited`); both must agree
    (`require_agreement`).

    If an accelerator has no clock that a step can write (`times` is None), the host waits for the
    device at every mark, and steps cannot be captured.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        ahead = device.type != "cpu" and choose(WRITE_CLOCK, device).implementation == "triton"
        self.times: Tensor | None = None
        if ahead:
            self.times = torch.zeros(len(BORDERS), dtype=torch.int64, device=device)
        self._under_way: deque[float] = deque()  # per step, the host's seconds that do not count
        self.reset()

    def reset(self) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.passes = 0
        self.ahead = AheadTally()
        self.waited = 0.0
        self._last = self._launched = time.perf_counter()
        self._step_ended: int | None = None

    # Marks of the host

    def start(self) -> None:
        """Drop the time since the last mark (it belongs to no phase)."""
        wait_for(self._device)
        self._last = time.perf_counter()

    def mark(self, phase: str) -> None:
        """Add the time since the last mark to `phase`."""
        wait_for(self._device)
        now = time.perf_counter()
        self.seconds[phase] += now - self._last
        self._last = now

    # Borders within a step

    def border(self, ended: str) -> None:
        """A step has reached the end of phase `ended` or, if empty, its beginning."""
        if self.times is not None:
            WRITE_CLOCK(self.times, BORDERS.index(ended))
        elif ended:
            self.mark(ended)

    # Steps that the host runs ahead of

    def launch(self) -> None:
        """A step is under way; `book` will be called with its times."""
        if not self._under_way:
            self._launched, self._step_ended = time.perf_counter(), None
        self._under_way.append(0.0)

    def excuse(self, seconds: float) -> None:
        """Do not count `seconds` for which the host held up the last launched step once, for its
        capture."""
        if self._under_way:
            self._under_way[-1] += seconds
            self._launched += seconds

    def book(self, times: Sequence[int]) -> None:
        """Count the oldest step under way, whose result has arrived; times: its `times`."""
        excused = self._under_way.popleft()
        if self._step_ended is not None:
            between = (times[0] - self._step_ended) / 1e9
            self.seconds["other"] += max(0.0, between - excused)
        for phase, begin, end in zip(BORDERS[1:], times, times[1:], strict=False):
            self.seconds[phase] += (end - begin) / 1e9
        self._step_ended = times[-1]
        if not self._under_way:
            self.waited += time.perf_counter() - self._launched

    def abandon(self) -> None:
        """The results of steps under way will not be read."""
        self._under_way.clear()

    def require_agreement(self) -> None:
        """Raise `UserError` if the device's clock and the host's disagree on the duration of the
        counted steps: no number computed from them would be valid."""
        if self.times is None or self.waited < SHORTEST:
            return
        booked = self.decode_seconds
        if abs(booked - self.waited) > AGREEMENT * self.waited:
            raise UserError(
                f"the decoding steps took {self.waited:.3f} s by the host's clock and "
                f"{booked:.3f} s by that of {self._device}; a measurement needs them within "
                f"{AGREEMENT:.0%} of each other. Repeat it with nothing else on the device and the "
                "host; if it persists, measure with decode.graph=off and report it."
            )

    @property
    def decode_seconds(self) -> float:
        """All seconds but prefill."""
        return sum(value for phase, value in self.seconds.items() if phase != "prefill")
