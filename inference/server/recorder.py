"""Writing a server's records in the background: a thread that flushes the log when a shard is full,
and every so often."""

from __future__ import annotations

import logging
import threading

from inference.server.metrics import ServerMetrics
from inference.verifications import VerificationLog

logger = logging.getLogger(__name__)
LOOK_SECONDS, FLUSH_SECONDS = 0.5, 60.0


class Recorder:
    """See the module."""

    def __init__(self, log: VerificationLog, metrics: ServerMetrics) -> None:
        self.log, self.metrics = log, metrics
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="headstart-records", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        self._flush()

    def _work(self) -> None:
        waited = 0.0
        while not self._stop.wait(LOOK_SECONDS):
            waited += LOOK_SECONDS
            if self.log.due or waited >= FLUSH_SECONDS:
                waited = 0.0
                self._flush()

    def _flush(self) -> None:
        full = self.log.full
        try:
            self.log.flush()
        except OSError as error:
            self.log.full = full = True
            logger.error("records cannot be written (%s); recording ends", error.strerror)
        if self.log.full and not full:
            logger.warning("recording has ended: serve.records_megabytes is reached")
        self.metrics.written.set(self.log.written)
        self.metrics.dropped.set(self.log.dropped)
