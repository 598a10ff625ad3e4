"""The display of a training: live progress, and a line per evaluation.

Without a terminal, the same figures are printed as a plain line every half minute.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from inference.target.memory import gib
from inference.terminal import make_console
from train.tracking.clock import PARTS

REFRESHES_PER_SECOND = 4
PLAIN_SECONDS = 30.0
"""Seconds between two plain lines."""


class Display:
    """Live progress on a terminal, plain lines elsewhere, nothing if not `active`."""

    def __init__(
        self,
        title: str,
        steps: int,
        done: int,
        console: Console | None = None,
        *,
        active: bool = True,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.console = console or make_console(stderr=True, quiet=not active)
        self.active, self.steps = active, steps
        self.tau = ""
        text = [
            TextColumn(each) for each in ("{task.description}", "{task.fields[figures]}", "left")
        ]
        columns = (text[0], BarColumn(bar_width=24), MofNCompleteColumn(), *text[1:])
        live = active and self.console.is_terminal
        self.plain, self.now = active and not live, now
        # step and time of this session's first figures
        self._first: tuple[int, float] | None = None
        self._told = 0.0
        rate = REFRESHES_PER_SECOND
        given: dict[str, Any] = {"refresh_per_second": rate, "disable": not live}
        self._bar = Progress(*columns, TimeRemainingColumn(), console=self.console, **given)
        self._task = self._bar.add_task(title, total=steps, completed=done, figures="")

    def __enter__(self) -> Display:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def step(
        self, step: int, loss: float, tokens_per_second: float, costs: Mapping[str, float]
    ) -> None:
        """Show the figures of a finished step. costs: see `train.tracking.meter.Meter.step`."""
        figures = f"loss {loss:.3f}{self.tau}  {tokens_per_second:,.0f} tokens/s  {spread(costs)}"
        self._bar.update(self._task, completed=step, figures=figures)
        if self.plain:
            self.tell(step, f"{figures}  memory {gib(int(costs.get('peak_memory', 0)))}")

    def tell(self, step: int, figures: str) -> None:
        """A plain line: for a session's first step, the last of all, and every `PLAIN_SECONDS`."""
        now = self.now()
        first, begun = self._first = self._first or (step, now)
        if first < step < self.steps and now - self._told < PLAIN_SECONDS:
            return
        self._told = now
        left = ""
        # assumes the time per step of this session so far, including measuring and saving
        if first < step < self.steps:
            seconds = (now - begun) / (step - first) * (self.steps - step)
            left = f"  left {timedelta(seconds=round(seconds))}"
        self.say(f"step {step}/{self.steps}: {figures}{left}")

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Show that tau is being measured, which explains the pause."""
        before = self._bar.tasks[self._task].fields["figures"]
        self._bar.update(self._task, figures="measuring tau", refresh=True)
        yield
        self._bar.update(self._task, figures=before)

    def show_tau(self, step: int, tau: float, ci95: tuple[float, float], best: bool) -> None:
        self.tau = f"  tau {tau:.2f}"
        interval, note = f"[{ci95[0]:.3f}, {ci95[1]:.3f}]", "  best so far" * best
        self.say(f"step {step}/{self.steps}: tau {tau:.3f} {interval}{note}")

    def say(self, text: str) -> None:
        if self.active:
            self.console.print(text, markup=False, highlight=False, soft_wrap=True)


def spread(costs: Mapping[str, float]) -> str:
    """Shares of the three largest parts, waiting for data if any, and the utilisation."""
    total = sum(costs.get(name, 0.0) for name in PARTS)
    if total <= 0:
        return ""
    shares = {name: costs.get(name, 0.0) / total for name in PARTS}
    largest = sorted(shares, key=lambda name: -shares[name])[:3]
    shown = [name for name in PARTS if name in largest or (name == "data" and shares[name] >= 0.01)]
    words = [f"{name} {shares[name]:.0%}" for name in shown]
    return " ".join(words + ([f"mfu {costs['mfu']:.0%}"] if "mfu" in costs else []))
