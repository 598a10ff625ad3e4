"""Reading a store: rows are found by the target's input, also while the store is being written.

Shards are memory-mapped, and a row's tokens are sliced from them. Of a shard that serves several
kinds, only the needed tensors are read. Each shard's SHA-256 is compared once per process. If a row
does not exist yet, the reader waits as long as the writers, which the error names, make progress.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from concurrent.futures import CancelledError
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from heads.api.errors import UserError
from inference.manifest import file_sha256
from inference.writers import Writer
from train.data.loader import PackedBatch
from train.features.store import layout
from train.features.store.batches import Content, join_rows
from train.features.store.claims import Claims
from train.features.store.layout import ShardIndex, index_path, shard_path

logger = logging.getLogger(__name__)

OPEN_SHARDS = 64
POLL_SECONDS, NOTICE_SECONDS = 0.25, 60.0
REMEDY = (
    "Delete it and run `headstart features` with the same settings: it writes only what is missing."
)


@dataclass(frozen=True)
class RowLocation:
    """Where a row lies: its shard and the run of tokens there."""

    shard: int
    start: int
    stop: int


class StoreReader:
    """A store opened for reading, from any thread. wanted: the identity that is expected;
    wait_seconds: how long to wait for a row while the writers make no progress. Raises `UserError`
    if the store is of other answers, another target or another form."""

    def __init__(self, folder: Path, wanted: layout.Identity, wait_seconds: float) -> None:
        self.folder, self.wait_seconds = folder, wait_seconds
        self.plan = layout.read_plan(folder)
        differences = self.plan.identity.differences(wanted)
        if differences:
            raise UserError(
                f"the feature store in '{folder}' does not fit this training: "
                f"{'; '.join(differences)}. Write one with `headstart features` and the "
                "training's settings, or set features.path to the right folder."
            )
        self.things = wanted.things()
        self._lock, self._stopped = threading.RLock(), threading.Event()
        self._places: dict[str, RowLocation] = {}
        self._indexed: set[int] = set()
        self._open: OrderedDict[int, Any] = OrderedDict()
        self._checked: set[int] = set()
        self.look()

    @property
    def complete(self) -> bool:
        return len(self._indexed) == self.plan.shards

    def look(self) -> bool:
        """Add the shards that have appeared since; returns whether there were any."""
        before = len(self._indexed)
        for shard in range(self.plan.shards):
            path = index_path(self.folder, shard)
            if shard in self._indexed or not path.is_file():
                continue
            start = 0
            for digest, length in ShardIndex.read(path).rows:
                self._places.setdefault(digest, RowLocation(shard, start, start + length))
                start += length
            self._indexed.add(shard)
        return len(self._indexed) > before

    def fetch(self, packed: PackedBatch) -> Content:
        """The stored tensors of a batch's tokens, row after row, as `encode_batch` made them."""
        with self._lock:
            rows = [self.read(self.find(digest)) for digest in layout.row_digests(packed)]
        return join_rows(rows)

    def find(self, digest: str) -> RowLocation:
        """The location of a row; waits for it if it is not written yet."""
        return self._places.get(digest) or self._await(digest)

    def _await(self, digest: str) -> RowLocation:
        """Look until the row exists; raises `UserError` after `wait_seconds` without progress."""
        claims = Claims(self.folder)
        moved = noticed = time.monotonic()
        signs: dict[str, float] = {}
        while True:
            progress = self.look()
            if digest in self._places:
                return self._places[digest]
            if self.complete:
                raise UserError(
                    f"a row of this training is not in the feature store '{self.folder}': its "
                    "documents were packed differently. Delete the folder and run `headstart "
                    "features` with the settings of the training."
                )
            now = time.monotonic()
            writing = claims.all()
            ages = {name: claim.age for name, claim in writing.items()}
            if progress or any(age < signs.get(name, float("inf")) for name, age in ages.items()):
                moved = now  # a new shard, a new claim, or a renewed one
            signs = ages
            if now - moved > self.wait_seconds:
                raise self._late(writing)
            if now - noticed > NOTICE_SECONDS or noticed == moved:
                logger.warning(
                    "waiting for features: %d of %d shards are written in '%s'",
                    len(self._indexed),
                    self.plan.shards,
                    self.folder,
                )
                noticed = now
            if self._stopped.wait(POLL_SECONDS):
                raise CancelledError

    def _late(self, writing: dict[str, Writer]) -> UserError:
        """The error for writers that make no progress, or do not exist."""
        who = ", ".join(f"{name}: {claim}" for name, claim in writing.items())
        state = f"{len(self._indexed)} of {self.plan.shards} shards are written"
        said = f"its writers have made no progress ({who})" if who else "nobody is writing it"
        return UserError(
            f"a row of this training is not yet in the feature store '{self.folder}' ({state}), "
            f"and for {self.wait_seconds:.0f} s {said}. Start `headstart features` with the same "
            "settings, which continues the store, and this command again; or raise "
            "features.wait_seconds."
        )

    def read(self, place: RowLocation) -> Content:
        handle = self._handle(place.shard)
        try:
            names = [name for name in handle.keys() if name.rsplit(".", 1)[0] in self.things]  # noqa: SIM118 - not a dictionary
            return layout.things_of(
                {name: handle.get_slice(name)[place.start : place.stop] for name in names}
            )
        except SafetensorError as error:
            path = shard_path(self.folder, place.shard)
            raise damage_error(path, f"it cannot be read ({error})") from error

    def _handle(self, shard: int) -> Any:
        """The opened shard, checked; the least recently used ones are closed again."""
        if shard in self._open:
            self._open.move_to_end(shard)
            return self._open[shard]
        path = shard_path(self.folder, shard)
        if shard not in self._checked:
            check_shard(path, ShardIndex.read(index_path(self.folder, shard)))
            self._checked.add(shard)
        try:
            handle = safe_open(str(path), framework="pt")
        except (SafetensorError, OSError) as error:
            raise damage_error(path, f"it cannot be opened ({error})") from error
        self._open[shard] = handle
        while len(self._open) > OPEN_SHARDS:
            self._open.popitem(last=False)
        return handle

    def stop(self) -> None:
        self._stopped.set()


def check_shard(path: Path, index: ShardIndex) -> None:
    """Raise `UserError` unless a shard has the size and the SHA-256 that its index names."""
    if not path.is_file():
        raise UserError(
            f"'{path}' is in the feature store's index but is not there. Run `headstart features` "
            f"with the same settings: it writes {path.name} again."
        )
    size = path.stat().st_size
    if size != index.bytes:
        raise damage_error(path, f"it has {size} bytes, but was written with {index.bytes}")
    found, written = file_sha256(path), index.sha256
    if found != written:
        what = f"its sha256 is {found[:12]}..., but was {written[:12]}... when it was written"
        raise damage_error(path, what)


def damage_error(path: Path, what: str) -> UserError:
    return UserError(
        f"the feature shard '{path}' was changed or damaged since it was written: {what}. {REMEDY}"
    )
