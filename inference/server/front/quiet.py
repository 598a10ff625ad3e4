"""A log that bad requests cannot flood: at most one line per kind and second, with a count."""

from __future__ import annotations

import logging
import threading
import time

SECONDS = 1.0


class QuietLog:
    """Logs the first event of a kind at once and counts those of the next second in the kind's next
    line. Kinds are words of the server, not of a client. Safe to use from several threads."""

    def __init__(self, logger: logging.Logger) -> None:
        self.logger = logger
        self._lock = threading.Lock()
        self._last: dict[str, float] = {}
        self._unsaid: dict[str, int] = {}

    def note(self, kind: str, message: str) -> None:
        """Log `message` unless a line of this kind was logged within the last second."""
        now = time.monotonic()
        with self._lock:
            if now - self._last.get(kind, -SECONDS) < SECONDS:
                self._unsaid[kind] = self._unsaid.get(kind, 0) + 1
                return
            self._last[kind] = now
            unsaid = self._unsaid.pop(kind, 0)
        more = f" (and {unsaid} more since the last such line)" if unsaid else ""
        self.logger.warning("%s: %s%s", kind, message, more)
