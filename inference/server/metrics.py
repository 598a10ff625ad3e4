"""The numbers that a server shows at /metrics; docs/server.md lists them. Words and definitions: docs/vocabulary.md."""

from __future__ import annotations

import os
from pathlib import Path

from inference.decoding.clock import StepClock
from inference.decoding.requests import PassRecord
from inference.measure.metrics import divide
from inference.server.exposition import Registry

OUTCOMES = (
    "stop", "length", "cancelled", "timeout", "overloaded", "unavailable", "invalid", "unauthorized", "error",
)  # fmt: skip
"""How a request can end: answered (stop, length), broken off by the client or by time, turned away (429, 503, 4xx, 401), failed."""
FIRST = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
PER_TOKEN = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
WHOLE = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class ServerMetrics:
    """All families of one server."""

    def __init__(self, depth: int, clock: StepClock, drafts: bool) -> None:
        """depth: deepest level that is drafted; clock: the engine's; drafts: whether there is a drafter."""
        self.depth, self.clock, self.drafts = depth, clock, drafts
        self.registry = registry = Registry(self._look)
        counter, gauge, histogram = registry.counter, registry.gauge, registry.histogram
        self.info = gauge("headstart_info", "What is served; always 1.", "target", "drafter", "shape", "version")
        self.requests = counter("headstart_requests_total", "Requests that ended, by outcome.", "outcome")
        for outcome in OUTCOMES:
            self.requests.add(0, outcome)
        self.running = gauge("headstart_requests_running", "Requests that are being decoded.")
        self.waiting = gauge("headstart_requests_waiting", "Requests that wait for a row.")
        self.rows = gauge("headstart_rows", "Rows that can be decoded together.")
        self.prompt_tokens = counter("headstart_prompt_tokens_total", "Prompt tokens read.", "domain")
        self.tokens = counter("headstart_generated_tokens_total", "Tokens generated, end of text included.", "domain")
        self.first = histogram("headstart_time_to_first_token_seconds", "Arrival to first token.", FIRST)
        self.per_token = histogram(
            "headstart_time_per_output_token_seconds", "Mean time per token after the first, per request.", PER_TOKEN
        )
        self.whole = histogram("headstart_request_seconds", "Arrival to the end of an answer.", WHOLE)
        self.passes = counter("headstart_verify_passes_total", "Verifications, of one request each.", "domain")
        self.committed = counter("headstart_committed_tokens_total", "Tokens committed by verifications.", "domain")
        self.tested = counter("headstart_tested_drafts_total", "Drafted tokens that were tested.", "domain")
        self.accepted = counter("headstart_accepted_drafts_total", "Drafted tokens that were kept.", "domain")
        self.by_depth = counter(
            "headstart_accepted_by_depth_total", "Verifications that kept a draft at this depth.", "domain", "depth"
        )
        self.tau = gauge("headstart_tau", "Committed tokens per verification, since the start.", "domain")
        self.beta = gauge(
            "headstart_acceptance", "Share of verifications that kept a draft at this depth (beta).", "domain", "depth"
        )
        self.steps = counter("headstart_steps_total", "Passes of the target over the whole batch.")
        self.drafter = counter("headstart_drafter_passes_total", "Passes of the drafter over the whole batch.")
        self.seconds = counter("headstart_engine_seconds_total", "Seconds of the engine by phase.", "phase")
        self.written = gauge("headstart_records_written", "Records of verifications on disk.")
        self.dropped = gauge("headstart_records_dropped", "Records that were not written: full, or too slow a disk.")
        self.memory = gauge("process_resident_memory_bytes", "Memory of this process.")

    def verified(self, domain: str, record: PassRecord) -> None:
        """Book one verification of one request."""
        self.passes.add(1, domain)
        self.committed.add(record.committed, domain)
        self.tested.add(record.accepted + record.rejected, domain)
        self.accepted.add(record.accepted, domain)
        for depth in range(1, record.accepted + 1):
            self.by_depth.add(1, domain, str(depth))

    def _look(self) -> None:
        """Set what follows from other numbers or is read off elsewhere."""
        passes, committed = self.passes.values(), self.committed.values()
        kept = self.by_depth.values()
        for (domain,), count in passes.items():
            self.tau.set(divide(committed.get((domain,), 0.0), count), domain)
            for depth in range(1, self.depth + 1):
                self.beta.set(divide(kept.get((domain, str(depth)), 0.0), count), domain, str(depth))
        self.steps.set(self.clock.passes)
        self.drafter.set(self.clock.passes if self.drafts else 0)
        for phase, seconds in self.clock.seconds.items():
            self.seconds.set(seconds, phase)
        self.memory.set(resident_bytes())


def resident_bytes(pid: int | str = "self") -> int:
    """Memory of a process in bytes; 0 where the system does not tell (no /proc)."""
    try:
        pages = Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]
    except OSError:
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")
