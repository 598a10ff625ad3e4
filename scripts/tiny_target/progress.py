"""Progress on the terminal: a rich bar where rich is installed and a terminal shows it, plain lines everywhere else."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any

START = time.monotonic()
_live: Any = None  # the rich.progress.Progress on screen, if any


def note(message: str) -> None:
    """Print one line with the seconds since the process started, above the bar where one is shown."""
    line = f"[{time.monotonic() - START:7.1f}s] {message}"
    if _live is None:
        print(line, flush=True)
    else:
        _live.console.print(line, markup=False, highlight=False)


class Bar:
    """A bar with the share done, a line of figures and the time left; without rich or terminal, the figures as lines."""

    def __init__(self, label: str) -> None:
        self.label = label
        self.task: Any = None

    def __enter__(self) -> Bar:
        """Show the bar if that is possible."""
        global _live
        try:  # a bare GPU image has no rich
            from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
        except ImportError:
            return self
        if sys.stdout.isatty() and _live is None:
            columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
            _live = Progress(*columns, TextColumn("{task.fields[figures]}"))
            self.task = _live.add_task(self.label, total=1.0, figures="")
            _live.start()
        return self

    def show(self, done: float, left: float, figures: str) -> None:
        """Report the share `done` (0 to 1), the seconds `left` and the latest figures."""
        if self.task is None:
            note(f"{figures}  {done:.1%} done, {left:.0f} s left")
        else:
            _live.update(self.task, completed=done, figures=f"{left:.0f} s left  {figures}")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Take the bar off the screen's live part; its last state stays visible."""
        global _live
        if self.task is not None:
            _live.stop()
            _live = self.task = None
