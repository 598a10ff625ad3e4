"""Progress on the terminal: rich where it is installed, plain lines where it is not (a bare GPU image)."""

from __future__ import annotations

import sys
import time

START = time.monotonic()


def note(message: str) -> None:
    """Print one line with the seconds since the process started."""
    print(f"[{time.monotonic() - START:7.1f}s] {message}", flush=True)
