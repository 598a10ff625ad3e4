"""Writes a server's records and samples in the background: a thread flushes them at intervals, and
whenever a shard is full."""

from __future__ import annotations

import logging
import threading

from inference.server.metrics import ServerMetrics
from inference.server.samples import TrafficSamples
from inference.verifications import VerificationLog

logger = logging.getLogger(__name__)
LOOK_SECONDS, FLUSH_SECONDS = 0.5, 60.0


class Recorder:
    """See the module. log: every verification; samples: of a learner, written every `seconds`;
    metrics: where both are counted."""

    def __init__(
        self,
        log: VerificationLog | None,
        samples: TrafficSamples | None,
        metrics: ServerMetrics | None,
        seconds: float = FLUSH_SECONDS,
    ) -> None:
        self.log, self.samples, self.metrics = log, samples, metrics
        self.seconds = seconds
        self._disk_full = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="headstart-records", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        self.flush()

    def _work(self) -> None:
        waited = 0.0
        look = min(LOOK_SECONDS, self.seconds)
        while not self._stop.wait(look):
            waited += look
            if waited >= self.seconds or any(one.due for one in (self.log, self.samples) if one):
                waited = 0.0
                try:
                    self.flush()
                except Exception:  # what was to be written is lost; the next rows are not
                    logger.exception("rows of records or samples cannot be written")

    def flush(self) -> None:
        """Write everything that is buffered."""
        if self.log is not None:
            self._flush_log(self.log)
        if self.samples is not None:
            self._flush_samples(self.samples)

    def _flush_log(self, log: VerificationLog) -> None:
        full = log.full
        try:
            log.flush()
        except OSError as error:
            log.full = full = True
            logger.error("records cannot be written (%s); recording ends", error.strerror)
        if log.full and not full:
            logger.warning("recording has ended: serve.records_megabytes is reached")
        if self.metrics is not None:
            self.metrics.written.set(log.written)
            self.metrics.dropped.set(log.dropped)

    def _flush_samples(self, samples: TrafficSamples) -> None:
        try:
            samples.flush()
            self._disk_full = False
        except OSError as error:
            if not self._disk_full:
                self._disk_full = True
                words = "samples cannot be written (%s); sampling goes on once they can"
                logger.error(words, error.strerror)
        if self.metrics is not None:
            self.metrics.sampled.set(samples.written)
            self.metrics.samples_dropped.set(samples.dropped)
