"""What a person sees while a drafter trains: progress with loss, tau, tokens/s and the time left, and a line per evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from train.clock import PARTS

REFRESHES_PER_SECOND = 4


class Display:
    """Live progress on a terminal, plain lines elsewhere. Use as a context manager; `active=False` shows nothing."""

    def __init__(
        self, title: str, steps: int, done: int, console: Console | None = None, *, active: bool = True
    ) -> None:
        self.console = console or Console(stderr=True, quiet=not active)
        self.active, self.steps = active, steps
        self.tau = ""
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        live = active and self.console.is_terminal
        self._bar = Progress(
            *columns, console=self.console, refresh_per_second=REFRESHES_PER_SECOND, disable=not live
        )
        self._task = self._bar.add_task(title, total=steps, completed=done, figures="")

    def __enter__(self) -> Display:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def step(self, step: int, loss: float, tokens_per_second: float, costs: Mapping[str, float]) -> None:
        """Show the figures of a finished step. costs: see `train.meter.Meter.step`."""
        self._bar.update(
            self._task,
            completed=step,
            figures=f"loss {loss:.3f}{self.tau}  {tokens_per_second:,.0f} tokens/s  {spread(costs)}",
        )

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Say that tau is being measured, so that a pause is understood."""
        before = self._bar.tasks[self._task].fields["figures"]
        self._bar.update(self._task, figures="measuring tau", refresh=True)
        yield
        self._bar.update(self._task, figures=before)

    def measured(self, step: int, tau: float, ci95: tuple[float, float], best: bool) -> None:
        """A line for an evaluation."""
        self.tau = f"  tau {tau:.2f}"
        self.say(
            f"step {step}/{self.steps}: tau {tau:.3f} [{ci95[0]:.3f}, {ci95[1]:.3f}]{'  best so far' if best else ''}"
        )

    def say(self, text: str) -> None:
        """A line above the progress."""
        if self.active:
            self.console.print(text, markup=False, highlight=False, soft_wrap=True)


def spread(costs: Mapping[str, float]) -> str:
    """Where the time went, for people: shares of the three largest parts, waiting for data if any, and the utilisation."""
    total = sum(costs.get(name, 0.0) for name in PARTS)
    if total <= 0:
        return ""
    shares = {name: costs.get(name, 0.0) / total for name in PARTS}
    largest = sorted(shares, key=lambda name: -shares[name])[:3]
    shown = [name for name in PARTS if name in largest or (name == "data" and shares[name] >= 0.01)]
    words = [f"{name} {shares[name]:.0%}" for name in shown]
    return " ".join(words + ([f"mfu {costs['mfu']:.0%}"] if "mfu" in costs else []))
