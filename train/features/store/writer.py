"""Writing a store: the frozen target runs once over the packed answers.

Rows are written in the order in which the first epoch of the training reads them, so that a
training that starts while the store is still being written finds each row as soon as it can. Any
number of processes write at once, of one launch or started by hand: each claims the first shard
that is missing. A shard is written whole or not at all, then its index; a rerun writes what is
missing.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, TypedDict, cast

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save

from heads.api.batch import TrainBatch
from heads.api.errors import UserError
from heads.api.target_info import TargetInfo
from inference import manifest
from inference.manifest import MANIFEST_FILE, write_bytes
from train.data.loader import PackedBatch, packed_rows
from train.data.pack import PackedData
from train.features.store import layout
from train.features.store.batches import Content, Form, Logits, encode_batch, join_rows, to_cpu
from train.features.store.claims import Claims, disk_error, folder_lock
from train.features.store.codec import parts_of, store_bytes
from train.features.store.layout import STORE_FILE, ShardIndex, index_path, shard_name, shard_path

logger = logging.getLogger(__name__)

MIB, GIB = 1 << 20, 1 << 30
DISK_RESERVE = 64 * MIB
"""Free space that a store leaves to others."""
POLL_SECONDS = 0.5

Compute = Callable[[PackedBatch], TrainBatch]
"""The target on a batch of packed rows; `train.features.OnlineFeatures.batch`."""


@dataclass
class Writer:
    """One process that writes a store. order: row numbers in the order in which they are stored;
    batch_rows: rows per forward pass, that of the training, since kernels may round differently at
    other sizes; say: where progress goes."""

    folder: Path
    plan: layout.StorePlan
    data: PackedData
    order: NDArray[np.int64]
    compute: Compute
    form: Form
    logits: Logits
    batch_rows: int
    say: Callable[[str], None]

    def __post_init__(self) -> None:
        self.claims = Claims(self.folder)

    def run(self) -> int:
        """Write, and wait for others, until no shard is missing; returns how many were written."""
        written, waiting = 0, False
        while missing := missing_shards(self.folder, self.plan):
            free = (number for number in missing if self.claims.take(shard_name(number)))
            shard = next(free, None)
            if shard is None:
                if not waiting:
                    self.say(f"waiting for {len(missing)} shards that other processes are writing")
                waiting = True
                time.sleep(POLL_SECONDS)
                continue
            try:
                # another writer may have ended it between look and claim
                if not is_whole(self.folder, shard):
                    self.write(shard)
                    written += 1
                    done = self.plan.shards - len(missing_shards(self.folder, self.plan))
                    self.say(f"{shard_name(shard)} is written: {done} of {self.plan.shards} shards")
            finally:
                self.claims.drop(shard_name(shard))
        return written

    def write(self, shard: int) -> None:
        """Compute and write one shard and its index."""
        first = shard * self.plan.rows_per_shard
        rows = self.order[first : first + self.plan.rows_per_shard]
        parts: list[Content] = []
        entries: list[tuple[str, int]] = []
        for start in range(0, len(rows), self.batch_rows):
            chosen = rows[start : start + self.batch_rows]
            # seeds belong to steps, not to rows
            packed = packed_rows(self.data, chosen, torch.zeros(len(chosen), dtype=torch.int64))
            batch, taps = self.compute(packed), self.plan.identity.taps
            parts.append(to_cpu(encode_batch(batch, taps, self.form, self.logits)))
            lengths = (packed.segments > 0).sum(1).tolist()
            entries += zip(layout.row_digests(packed), lengths, strict=True)
            self.claims.renew(shard_name(shard))
        content = save(layout.tensors_of(join_rows(parts)), metadata={"format": "pt"})
        path = shard_path(self.folder, shard)
        try:
            write_bytes(path, content)
            name, digest = str(path.relative_to(self.folder)), hashlib.sha256(content).hexdigest()
            index = ShardIndex(file=name, bytes=len(content), sha256=digest, rows=entries)
            index.write(index_path(self.folder, shard))
        except OSError as error:
            raise disk_error(self.folder, error) from error


def make_plan(
    data: PackedData,
    identity: layout.Identity,
    per_token: float,
    target: TargetInfo,
    shard_bytes: int,
) -> layout.StorePlan:
    """How the rows of `data` are divided into shards of about `shard_bytes` bytes."""
    rows, tokens, hidden = len(data), data.report.tokens, target.hidden_size
    per_row = max(1.0, per_token * tokens / rows)
    rows_per_shard = max(1, min(rows, int(shard_bytes / per_row)))
    shards = -(-rows // rows_per_shard)
    states = len(identity.taps) + int(identity.last_hidden and not identity.top_logits)
    tensors = states * len(parts_of(identity.format, hidden)) + 3 * (identity.top_logits > 0)
    size = store_bytes(per_token, tokens, rows, shards, tensors)
    facts = target.to_dict()
    return layout.StorePlan(identity, rows, tokens, rows_per_shard, hidden, size, facts)


def open_store(folder: Path, plan: layout.StorePlan, quota_bytes: int) -> layout.StorePlan:
    """Begin or continue a store; returns the plan that its shards follow: that of the first writer,
    as one at a time comes through here. Raises `UserError` for another store in the folder, or a
    quota or a disk without room."""
    with folder_lock(folder):
        manifest.remove_leftovers(folder)  # of killed writers, before the room is counted
        if (folder / STORE_FILE).is_file():
            stored = layout.read_plan(folder)
            differences = stored.identity.differences(plan.identity)
            if differences or (stored.rows, stored.tokens) != (plan.rows, plan.tokens):
                differences = differences or [f"it is for {stored.rows} rows, not {plan.rows}"]
                raise UserError(
                    f"the feature store in '{folder}' cannot be continued: "
                    f"{'; '.join(differences)}. Give another features.path, or delete the folder."
                )
            plan = stored
        if missing_shards(folder, plan):
            (folder / MANIFEST_FILE).unlink(missing_ok=True)
        check_room(folder, plan, quota_bytes)
        if not (folder / STORE_FILE).is_file():
            plan.write(folder)
    return plan


def check_room(folder: Path, plan: layout.StorePlan, quota_bytes: int) -> None:
    """Raise `UserError` when the store exceeds its quota, or its rest what is free."""
    if quota_bytes and plan.estimated_bytes > quota_bytes:
        raise UserError(
            f"the features would take {gib(plan.estimated_bytes)}, but features.quota_gib allows "
            f"{gib(quota_bytes)}. Raise it, choose a smaller features.format (int8 is half of "
            "bf16, int4 less than a third), or train on fewer answers."
        )
    whole = filter(partial(is_whole, folder), range(plan.shards))
    there = sum(shard_path(folder, shard).stat().st_size for shard in whole)
    missing = max(0, plan.estimated_bytes - there)
    free = shutil.disk_usage(folder).free
    if missing and missing + DISK_RESERVE > free:
        raise UserError(
            f"the features still need {gib(missing)}, but the disk of '{folder}' has {gib(free)} "
            f"free (of which {gib(DISK_RESERVE)} are left alone). Make room, set features.path to "
            "another disk, or choose a smaller features.format."
        )


def gib(count: float) -> str:
    """Bytes as people read them."""
    return f"{count / GIB:,.2f} GiB" if count >= GIB / 10 else f"{count / MIB:,.2f} MiB"


def is_whole(folder: Path, shard: int) -> bool:
    """Whether a shard and its index are there and of one size; content is checked when read."""
    index, path = index_path(folder, shard), shard_path(folder, shard)
    if not (index.is_file() and path.is_file()):
        return False
    return path.stat().st_size == _bytes_in(index, index.stat().st_mtime_ns)


@cache
def _bytes_in(index: Path, _modified: int) -> int:
    """The size that an index names for its shard; read once per change."""
    return ShardIndex.read(index).bytes


def missing_shards(folder: Path, plan: layout.StorePlan) -> list[int]:
    return [shard for shard in range(plan.shards) if not is_whole(folder, shard)]


def drop_damaged(folder: Path, plan: layout.StorePlan) -> list[str]:
    """Delete the shards that are not what their index says; returns their names. Reads all."""
    dropped = []
    for shard in filter(partial(is_whole, folder), range(plan.shards)):
        path = shard_path(folder, shard)
        if manifest.file_sha256(path) != ShardIndex.read(index_path(folder, shard)).sha256:
            path.unlink()
            dropped.append(path.name)
    return dropped


class StoreManifest(TypedDict):
    """The manifest of a complete store. index: the shards' index files."""

    identity: dict[str, object]
    rows: int
    tokens: int
    hidden: int
    estimated_bytes: int
    target: dict[str, object]
    bytes: int
    shards: list[dict[str, Any]]
    index: list[manifest.FileEntry]


def finish_store(
    folder: Path, plan: layout.StorePlan, provenance: Mapping[str, object] | None
) -> StoreManifest:
    """Write the manifest of a store whose shards are all there, once; returns it."""
    with folder_lock(folder):
        if not (folder / MANIFEST_FILE).is_file():
            paths = [index_path(folder, shard) for shard in range(plan.shards)]
            shards: list[dict[str, Any]] = []
            for index in map(ShardIndex.read, paths):
                tokens = sum(length for _, length in index.rows)
                counts = {"rows": len(index.rows), "tokens": tokens}
                shards.append({**index.model_dump(exclude={"rows"}), **counts})
            known = asdict(plan)
            del known["rows_per_shard"]
            size = sum(entry["bytes"] for entry in shards)
            size += sum(path.stat().st_size for path in paths)
            indices = [manifest.file_entry(folder, str(path.relative_to(folder))) for path in paths]
            content = {**known, "bytes": size, "shards": shards, "index": indices}
            manifest.write_manifest(folder, "features", content, provenance)
    return cast(StoreManifest, manifest.read_manifest(folder, "features"))
