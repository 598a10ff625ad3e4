"""Samples of a server's traffic for its learner: batches of whole answers with their verifications.

The samples are a folder of records (`inference.verifications`) whose shards are numbered by the
time of writing, in rising order. Batch N is `verifications-N.parquet` and `sequences-N.parquet`; it
is complete once the latter exists. The learner removes the batches that it reads. If the folder
exceeds its size limit, the oldest batches are dropped. records.json names no drafter, since the
drafter may change while the server runs.

Stored of a request: token ids of prompt and answer, domain, temperature, how it ended, and a hash
of its client under a key that is drawn at the start and not stored. Never stored: the client's
address, headers, keys, seeds, stop strings, and the parameters that the server ignores (`user`,
`metadata`, ...).
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from heads.api.errors import UserError
from inference.decoding.requests import PassRecord
from inference.manifest import write_bytes, write_json
from inference.verifications import (
    FACTS_FILE,
    FORMAT,
    ROWS_PER_SHARD,
    SEQUENCES,
    VERIFICATIONS,
    RecordFacts,
    VerificationLog,
    read_facts,
)

logger = logging.getLogger(__name__)
UNLIMITED = 1 << 62
NEWEST_FILE = "newest"
"""Contains the number of the last batch."""
MOST_WAITING = 8 * ROWS_PER_SHARD
"""Most verifications that wait in memory for the next batch."""


@dataclass(frozen=True)
class SampledAnswer:
    """An answer that has ended. client: who asked; tokens: of the answer; passes: its
    verifications, with details; none where an engine answered."""

    sequence: str
    domain: str
    client: str
    prompt: Sequence[int]
    tokens: Sequence[int]
    passes: Sequence[PassRecord]
    temperature: float
    finish: str


class TrafficSamples:
    """Takes answers from the server's worker (`add`) and writes them from another thread (`flush`).

    facts: of the server's records; share: of the answers, sampled at random; max_bytes: limit on
    the size of all waiting batches. Batches of another target or rule are dropped. written: answers
    written; dropped: batches that did not fit or could not be written.
    """

    def __init__(self, folder: Path, facts: RecordFacts, max_bytes: int, share: float) -> None:
        self.folder, self.max_bytes, self.share = folder, max_bytes, share
        self.written = self.dropped = 0
        self._random = random.Random()
        shared: RecordFacts = {"target": facts["target"], "rule": facts.get("rule", "match")}
        self._start_folder(shared)
        self._log = VerificationLog(folder, shared, UNLIMITED, held=None)
        self._newest = newest(folder)
        self._lock = threading.Lock()
        self._waiting: list[SampledAnswer] = []
        self._passes = 0

    def _start_folder(self, facts: RecordFacts) -> None:
        whole = {"format": FORMAT, "redacted": False, **facts}
        try:
            known = read_facts(self.folder) if (self.folder / FACTS_FILE).is_file() else None
        except UserError:
            known = {}
        if known is not None and known != whole:
            logger.warning("'%s' holds samples of another target; they are dropped", self.folder)
            for name in batches(self.folder):
                remove_batch(self.folder, name)
            write_json(self.folder / FACTS_FILE, whole)
        for path in self.folder.glob(f"{VERIFICATIONS}-*.parquet"):  # killed between two files
            if not _file(self.folder, SEQUENCES, _name(path)).is_file():
                path.unlink(missing_ok=True)

    def chosen(self) -> bool:
        """Whether the next answer is sampled."""
        return self._random.random() < self.share

    def add(self, answer: SampledAnswer) -> None:
        """Take an answer; it is left out if there is no room before the next `flush`."""
        with self._lock:
            if self._passes < MOST_WAITING:
                self._waiting.append(answer)
                self._passes += max(1, len(answer.passes))

    @property
    def due(self) -> bool:
        """Whether a batch is full."""
        return self._passes >= ROWS_PER_SHARD

    def flush(self) -> None:
        """Write the buffered answers as a batch, and drop old batches if needed. Raises `OSError`
        if the batch cannot be written; only that batch is lost then."""
        with self._lock:
            answers, self._waiting, self._passes = self._waiting, [], 0
        if not answers:
            return
        # later than all before, also after a clock was set back
        self._newest = max(time.time_ns(), self._newest + 1)
        name = f"{self._newest:020d}"
        try:
            write_bytes(self.folder / NEWEST_FILE, name.encode())
            for each in answers:
                self._record(each)
            self._log.flush(name)
        except OSError:
            remove_batch(self.folder, name)
            self.dropped += 1
            raise
        self.written += len(answers)
        self._make_room()

    def _record(self, one: SampledAnswer) -> None:
        root = len(one.prompt)  # the answer's first token comes from reading the prompt
        for record in one.passes:
            self._log.verification(one.sequence, root, one.domain, record, one.temperature)
            root += record.committed
        ended = (None, one.temperature, one.finish, one.client)
        self._log.sequence(one.sequence, one.domain, one.prompt, one.tokens, *ended)

    def _make_room(self) -> None:
        waiting = {name: batch_bytes(self.folder, name) for name in batches(self.folder)}
        while waiting and sum(waiting.values()) > self.max_bytes:
            oldest = min(waiting)
            remove_batch(self.folder, oldest)
            del waiting[oldest]
            self.dropped += 1


def newest(folder: Path) -> int:
    """The number of the last batch that was written, also if it was removed since; 0 if none."""
    found = 0
    with suppress(OSError, ValueError):
        found = int((folder / NEWEST_FILE).read_bytes())
    return max([found, *(int(name) for name in batches(folder) if name.isdigit())])


def batches(folder: Path) -> list[str]:
    """The names of all complete batches, oldest first."""
    return sorted(_name(path) for path in folder.glob(f"{SEQUENCES}-*.parquet"))


def batch_files(folder: Path, name: str) -> tuple[Path, Path]:
    """The files of a batch: sequences and verifications."""
    return _file(folder, SEQUENCES, name), _file(folder, VERIFICATIONS, name)


def batch_bytes(folder: Path, name: str) -> int:
    """The size of a batch on disk; 0 if it was removed."""
    size = 0
    for path in batch_files(folder, name):
        with suppress(FileNotFoundError):
            size += path.stat().st_size
    return size


def remove_batch(folder: Path, name: str) -> None:
    """Remove a batch; first the file that marks it as complete."""
    for path in batch_files(folder, name):
        path.unlink(missing_ok=True)


def _file(folder: Path, table: str, name: str) -> Path:
    return folder / f"{table}-{name}.parquet"


def _name(path: Path) -> str:
    return path.stem.rpartition("-")[2]
