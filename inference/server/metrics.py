"""The metrics that a server exposes at /metrics; docs/server.md lists them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from inference.decoding.clock import StepClock
from inference.decoding.requests import PassRecord
from inference.measure.metrics import divide
from inference.server.front.seats import Seats

OUTCOMES = "stop length cancelled timeout overloaded unavailable invalid unauthorized error".split()
"""How a request ends: answered (stop, length), ended by the client or a timeout (cancelled,
timeout), refused (429, 503, 4xx, 401), or failed."""
FIRST = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
PER_TOKEN = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
WHOLE = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)

disable_created_metrics()  # they add an unused series per counter and histogram


class ServerMetrics:
    """All metrics of one server, in a separate registry; safe to use from several threads."""

    def __init__(self, depth: int, clock: StepClock, drafts: bool) -> None:
        """depth: deepest drafted level; clock: the engine's; drafts: whether there is a drafter."""
        self.registry = CollectorRegistry()

        def counter(name: str, about: str, *labels: str) -> Counter:
            return Counter(f"headstart_{name}", about, labels, registry=self.registry)

        def gauge(name: str, about: str, *labels: str) -> Gauge:
            return Gauge(f"headstart_{name}", about, labels, registry=self.registry)

        def histogram(name: str, about: str, bounds: tuple[float, ...]) -> Histogram:
            return Histogram(f"headstart_{name}", about, buckets=bounds, registry=self.registry)

        served = ("target", "drafter", "shape", "version")
        self.info = gauge("info", "What is served; always 1.", *served)
        self.requests = counter("requests_total", "Requests that ended, by outcome.", "outcome")
        for outcome in OUTCOMES:
            self.requests.labels(outcome)
        self.running = gauge("requests_running", "Requests that are being decoded.")
        self.waiting = gauge("requests_waiting", "Requests that wait for a row.")
        self.rows = gauge("rows", "Rows that can be decoded together.")
        self.prompt_tokens = counter("prompt_tokens_total", "Prompt tokens read.", "domain")
        about = "Tokens generated, end of text included."
        self.tokens = counter("generated_tokens_total", about, "domain")
        self.first = histogram("time_to_first_token_seconds", "Arrival to first token.", FIRST)
        about = "Mean time per token after the first, per request."
        self.per_token = histogram("time_per_output_token_seconds", about, PER_TOKEN)
        self.whole = histogram("request_seconds", "Arrival to the end of an answer.", WHOLE)
        about = "Verifications, of one request each."
        self.passes = counter("verify_passes_total", about, "domain")
        about = "Tokens committed by verifications."
        self.committed = counter("committed_tokens_total", about, "domain")
        self.tested = counter("tested_drafts_total", "Drafted tokens that were tested.", "domain")
        self.accepted = counter("accepted_drafts_total", "Drafted tokens that were kept.", "domain")
        about = "Verifications that kept a draft at this depth."
        self.by_depth = counter("accepted_by_depth_total", about, "domain", "depth")
        self.written = gauge("records_written", "Records of verifications on disk.")
        about = "Records that were not written: full, or too slow a disk."
        self.dropped = gauge("records_dropped", about)
        about = "Answers that were sampled for the learner and written."
        self.sampled = gauge("samples_written", about)
        about = "Batches of samples that were dropped: no room, nobody read them, or a full disk."
        self.samples_dropped = gauge("samples_dropped", about)
        self.seats: Seats | None = None
        self.registry.register(_Derived(self, depth, clock, drafts))

    def watch(self, seats: Seats) -> None:
        """Show the connections of a front."""
        self.seats = seats

    def verified(self, domain: str, record: PassRecord) -> None:
        self.passes.labels(domain).inc()
        self.committed.labels(domain).inc(record.committed)
        self.tested.labels(domain).inc(record.accepted + record.rejected)
        self.accepted.labels(domain).inc(record.accepted)
        for depth in range(1, record.accepted + 1):
            self.by_depth.labels(domain, str(depth)).inc()


class _Derived(Collector):
    """Metrics that are derived from others or read from elsewhere when /metrics is requested."""

    def __init__(self, metrics: ServerMetrics, depth: int, clock: StepClock, drafts: bool) -> None:
        self.metrics, self.depth, self.clock, self.drafts = metrics, depth, clock, drafts

    def describe(self) -> list[Metric]:
        """Nothing: so the registry checks no names, and registering collects nothing."""
        return []

    def collect(self) -> Iterator[Metric]:
        """tau and acceptance by depth, computed from the counters on request, and the others."""
        about = "Committed tokens per verification, since the start."
        tau = GaugeMetricFamily("headstart_tau", about, labels=["domain"])
        about = "Share of verifications that kept a draft at this depth (beta)."
        beta = GaugeMetricFamily("headstart_acceptance", about, labels=["domain", "depth"])
        committed, kept = _totals(self.metrics.committed), _totals(self.metrics.by_depth)
        for (domain,), passes in _totals(self.metrics.passes).items():
            tau.add_metric([domain], divide(committed.get((domain,), 0.0), passes))
            for depth in map(str, range(1, self.depth + 1)):
                beta.add_metric([domain, depth], divide(kept.get((domain, depth), 0.0), passes))
        steps = self.clock.passes
        about = "Seconds of the engine by phase."
        seconds = CounterMetricFamily("headstart_engine_seconds_total", about, labels=["phase"])
        for phase, value in self.clock.seconds.items():
            seconds.add_metric([phase], value)
        yield from (tau, beta)
        about = "Passes of the target over the whole batch."
        yield CounterMetricFamily("headstart_steps_total", about, steps)
        about = "Steps over the whole batch in which the drafter drafted."
        drafted = steps if self.drafts else 0
        yield CounterMetricFamily("headstart_drafter_passes_total", about, drafted)
        yield seconds
        if (seats := self.metrics.seats) is not None:
            yield GaugeMetricFamily("headstart_connections", "Open connections.", len(seats))
            about = "Connections that were ended for new ones, or refused."
            dropped = CounterMetricFamily(
                "headstart_connections_dropped_total", about, labels=["how"]
            )
            dropped.add_metric(["displaced"], seats.displaced)
            dropped.add_metric(["refused"], seats.refused)
            yield dropped
        about = "Memory of this process."
        yield GaugeMetricFamily("process_resident_memory_bytes", about, resident_bytes())


def _totals(counter: Counter) -> dict[tuple[str, ...], float]:
    """A counter's totals by label values, which are in the order of its labels."""
    (family,) = counter.collect()
    return {tuple(sample.labels.values()): sample.value for sample in family.samples}


def resident_bytes(pid: int | str = "self") -> int:
    """Memory of a process in bytes; 0 if it is not known (no /proc)."""
    try:
        pages = Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]
    except OSError:
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")
