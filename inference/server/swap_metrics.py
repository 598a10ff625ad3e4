"""The metrics of a server's drafters: which one drafts, how often it changed, and the results of
both drafters during a trial."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from inference.decoding.requests import PassRecord

PAUSES = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class SwapMetrics:
    """See the module. registry: the server's."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, about: str, label: str) -> Counter:
            return Counter(f"headstart_{name}", about, [label], registry=registry)

        about = "The drafter that drafts, besides a candidate; always 1."
        self.drafter = Gauge("headstart_drafter", about, ["drafter"], registry=registry)
        about = "Drafters that were offered to the running server, by outcome."
        self.swaps = counter("drafter_swaps_total", about, "outcome")
        for outcome in ("installed", "refused"):
            self.swaps.labels(outcome)
        about = "Seconds for which decoding stood still while a drafter was taken."
        self.pause = Histogram(
            "headstart_drafter_swap_seconds", about, buckets=PAUSES, registry=registry
        )
        about = "Whether a candidate drafts beside the drafter."
        self.trial = Gauge("headstart_drafter_trial", about, registry=registry)
        about = "Verifications in trials, by who drafted."
        self.passes = counter("trial_verify_passes_total", about, "arm")
        about = "Tokens committed by verifications in trials."
        self.committed = counter("trial_committed_tokens_total", about, "arm")
        about = "Drafted tokens that were kept in trials."
        self.accepted = counter("trial_accepted_drafts_total", about, "arm")
        for arm in ("current", "candidate"):
            for one in (self.passes, self.committed, self.accepted):
                one.labels(arm)

    def shows(self, name: str) -> None:
        """Set the drafter's name."""
        self.drafter.clear()
        self.drafter.labels(name).set(1)

    def booked(self, candidate: bool, record: PassRecord) -> None:
        """Count a verification of a trial."""
        arm = "candidate" if candidate else "current"
        self.passes.labels(arm).inc()
        self.committed.labels(arm).inc(record.committed)
        self.accepted.labels(arm).inc(record.accepted)
