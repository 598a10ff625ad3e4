"""A candidate beside the drafter in a running server: what each of the two has done, at any time.

Every request that begins while a trial runs drafts with one of the two, by a hash of its seed and
number; requests that ran before keep the drafter and do not count. The text never depends on it.

An answer is one observation for the sequential test: the drafted tokens that its first `most`
passes accepted, and how many passes those were (`inference.staleness.evidence.Bets.add`). It is
known as soon as it has so many passes, or has ended.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from inference.decoding.requests import PassRecord, Request

MOST_ANSWERS = 200_000
"""Answers of an arm that are kept one by one; later ones count in the sums alone."""


@dataclass(frozen=True)
class ArmAnswer:
    """One answer. accepted: drafted tokens that its first `passes` verifications kept; passes: at
    most `TrialState.most`, at least 1."""

    domain: str
    accepted: int
    passes: int


@dataclass(frozen=True)
class ArmState:
    """What one drafter of a trial has done so far.

    drafter: its checkpoint folder or kind; rows: requests that were given it; passes, committed,
    accepted: their verifications, the tokens committed by these, the drafted ones among them;
    answers: the observations, in the order in which they were complete.
    """

    drafter: str
    rows: int
    passes: int
    committed: int
    accepted: int
    answers: tuple[ArmAnswer, ...]

    @property
    def tau(self) -> float:
        """Committed tokens per verification; 1.0 before the first."""
        return self.committed / self.passes if self.passes else 1.0


@dataclass(frozen=True)
class TrialState:
    """A trial as it stands. share: of the requests that draft with the candidate; most: passes of
    an answer that count as its observation; depth: deepest drafted level, for
    `inference.staleness.evidence.Grid`."""

    current: ArmState
    candidate: ArmState
    share: float
    most: int
    depth: int


def drafts_with_candidate(share: float, request: Request) -> bool:
    """Whether a request drafts with the candidate: the same for the same seed and number."""
    key = f"{request.seed}:{request.index}".encode()
    place = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big")
    return place < share * 2.0**64


@dataclass
class _Arm:
    """The sums of one drafter; `open` has the answers under way by their request's index."""

    drafter: str
    rows: int = 0
    passes: int = 0
    committed: int = 0
    accepted: int = 0
    answers: list[ArmAnswer] = field(default_factory=list)
    open: dict[int, list[int]] = field(default_factory=dict)

    def state(self) -> ArmState:
        sums = self.drafter, self.rows, self.passes, self.committed, self.accepted
        return ArmState(*sums, tuple(self.answers))


class TrialCounts:
    """The counters of one trial. The worker counts, any thread may look."""

    def __init__(
        self,
        current: str,
        candidate: str,
        share: float,
        most: int,
        depth: int,
        booked: Callable[[bool, PassRecord], None] = lambda candidate, record: None,
    ) -> None:
        """booked: told of every verification that counts, and whether the candidate drafted."""
        self.share, self.most, self.depth, self.booked = share, most, depth, booked
        self._arms = _Arm(current), _Arm(candidate)
        self._lock = threading.Lock()

    def count(self, index: int, domain: str, record: PassRecord) -> None:
        """Book a verification of request `index`, unless that began before the trial."""
        if record.arm is None:
            return
        with self._lock:
            arm = self._arms[record.arm]
            if index not in arm.open:
                arm.rows += 1
                arm.open[index] = []
            arm.passes += 1
            arm.committed += record.committed
            arm.accepted += record.accepted
            kept = arm.open[index]
            if len(kept) < self.most:
                kept.append(record.accepted)
                if len(kept) == self.most:
                    self._observe(arm, domain, kept)
        self.booked(bool(record.arm), record)

    def ended(self, index: int, domain: str) -> None:
        """A request has ended, however."""
        with self._lock:
            for arm in self._arms:
                kept = arm.open.pop(index, [])
                if 0 < len(kept) < self.most:
                    self._observe(arm, domain, kept)

    def _observe(self, arm: _Arm, domain: str, kept: list[int]) -> None:
        if len(arm.answers) < MOST_ANSWERS:
            arm.answers.append(ArmAnswer(domain, sum(kept), len(kept)))

    def state(self) -> TrialState:
        """A copy of everything as it stands."""
        with self._lock:
            current, candidate = (arm.state() for arm in self._arms)
        return TrialState(current, candidate, self.share, self.most, self.depth)
