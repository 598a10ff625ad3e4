"""A trial of a candidate beside the drafter of a running server: the results of both so far.

Every request that begins during a trial drafts with one of the two. A hash of its seed and number
under a key drawn for the trial decides, so that no client can choose. Requests that ran before keep
the drafter and do not count. The text never depends on the choice.

An answer is one observation for the sequential test: the drafted tokens that its first `most`
passes accepted, and the number of these passes (`inference.staleness.evidence.Bets.add`). It is
complete once the answer has that many passes, or has ended. Its client is a number, in the order in
which clients joined the trial. The number suffices to bound the weight of one client, and no
address is stored.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from inference.decoding.requests import PassRecord, Request

MOST_ANSWERS = 200_000
"""Most answers of an arm that are kept individually; later ones count only in the sums."""


@dataclass(frozen=True)
class ArmAnswer:
    """One answer. accepted: drafted tokens that its first `passes` verifications kept; passes: at
    most `TrialState.most`, at least 1; client: its number, from 0, the same in both arms."""

    domain: str
    accepted: int
    passes: int
    client: int = 0


@dataclass(frozen=True)
class ArmState:
    """The results of one drafter of a trial so far.

    drafter: its checkpoint folder or kind; rows: its requests with at least one verification;
    passes, committed, accepted: their verifications, the tokens that these committed, and the
    drafted ones of these; answers: the observations, in the order of completion.
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
    """The current state of a trial. share: of the requests that draft with the candidate; most:
    most passes of an answer that count in its observation; depth: deepest drafted level, for
    `inference.staleness.evidence.Grid`."""

    current: ArmState
    candidate: ArmState
    share: float
    most: int
    depth: int


def drafts_with_candidate(share: float, key: bytes, request: Request) -> bool:
    """Whether a request drafts with the candidate: a function of its seed and number under a key of
    at most 64 bytes, which clients do not know."""
    own = f"{request.seed}:{request.index}".encode()
    place = int.from_bytes(hashlib.blake2b(own, digest_size=8, key=key).digest(), "big")
    return place < share * 2.0**64


@dataclass
class _Arm:
    """The sums of one drafter; `open` has the answers under way by the index of their request."""

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
    """The counters of one trial. The worker counts; any thread may read."""

    def __init__(
        self,
        current: str,
        candidate: str,
        share: float,
        most: int,
        depth: int,
        booked: Callable[[bool, PassRecord], None] = lambda candidate, record: None,
    ) -> None:
        """booked: called for every verification that counts, with whether the candidate drafted."""
        self.share, self.most, self.depth, self.booked = share, most, depth, booked
        self._arms = _Arm(current), _Arm(candidate)
        self._clients = dict[str, int]()
        self._lock = threading.Lock()

    def count(self, index: int, domain: str, record: PassRecord, client: str = "") -> None:
        """Count a verification of a client's request `index`, unless the request began before the
        trial."""
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
                    self._observe(arm, domain, kept, client)
        self.booked(bool(record.arm), record)

    def ended(self, index: int, domain: str, client: str = "") -> None:
        """Note that a client's request has ended, for any reason."""
        with self._lock:
            for arm in self._arms:
                kept = arm.open.pop(index, [])
                if 0 < len(kept) < self.most:
                    self._observe(arm, domain, kept, client)

    def _observe(self, arm: _Arm, domain: str, kept: list[int], client: str) -> None:
        if len(arm.answers) < MOST_ANSWERS:
            number = self._clients.setdefault(client, len(self._clients))
            arm.answers.append(ArmAnswer(domain, sum(kept), len(kept), number))

    def state(self) -> TrialState:
        """A copy of the current state."""
        with self._lock:
            current, candidate = (arm.state() for arm in self._arms)
        return TrialState(current, candidate, self.share, self.most, self.depth)
