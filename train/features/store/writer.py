"""Writing a store: the frozen target runs once over the packed answers.

Rows are written in the order in which the first epoch reads them, so that a training that starts
meanwhile finds each row as early as possible. Any number of processes can write at once: each
claims the first missing shard. A shard is written whole or not at all, and its index after it; a
rerun writes the missing shards.
"""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save
from typing_extensions import TypedDict

from heads.api.batch import TrainBatch
from heads.api.errors import UserError
from heads.api.features import FeatureSpec, union
from heads.api.registry import get_kind
from heads.api.target_info import TargetInfo
from inference import manifest
from inference.manifest import MANIFEST_FILE, write_bytes
from inference.target.loading import TargetConfig, pick_device
from inference.target.model import TargetModel
from inference.target.settings import loading_text
from inference.writers import turn
from train.data.loader import PackedBatch, packed_rows
from train.data.pack import PackedData
from train.data.permute import stable_permutation
from train.features.base import FeatureTarget, OnlineFeatures
from train.features.config import FeaturesConfig
from train.features.document_target import document_target
from train.features.store import layout
from train.features.store.batches import Content, Form, Logits, encode_batch, join_rows, to_cpu
from train.features.store.claims import Claims, disk_error
from train.features.store.codec import FORMATS, bytes_per_token, parts_of, states_of, store_bytes
from train.features.store.layout import ShardIndex, index_path, shard_name, shard_path
from train.processes import terminable

MIB, GIB = 1 << 20, 1 << 30
DISK_RESERVE = 64 * MIB
"""Free disk space that a store leaves for others."""
POLL_SECONDS = 0.5

Compute = Callable[[PackedBatch], TrainBatch]
"""The target on a batch of packed rows; `train.features.OnlineFeatures.batch`."""


@dataclass
class Writer:
    """One process that writes a store. order: row numbers in the order in which they are stored;
    batch_rows: rows per forward pass, as in the training, because kernels may round differently at
    other sizes; say: called with lines about progress."""

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
        """Write, and wait for others, until no shard is missing; returns how many it wrote."""
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
                # another writer may have completed it between look and claim
                if not is_whole(self.folder, shard):
                    self.write(shard)
                    written += 1
                    done = self.plan.shards - len(missing_shards(self.folder, self.plan))
                    self.say(f"{shard_name(shard)} is written: {done} of {self.plan.shards} shards")
            finally:
                self.claims.drop(shard_name(shard))
        self.claims.clear()
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
    """Begin or continue a store; returns the plan that its shards follow. It is the first writer's,
    because one process at a time runs this. Raises `UserError` for another store in the folder, or
    a quota or a disk without room."""
    with turn(folder):
        manifest.remove_leftovers(folder)  # of killed writers, before the free space is counted
        if (folder / layout.STORE_FILE).is_file():
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
        if not (folder / layout.STORE_FILE).is_file():
            plan.write(folder)
    return plan


def check_room(folder: Path, plan: layout.StorePlan, quota_bytes: int) -> None:
    """Raise `UserError` if the store exceeds its quota, or its missing part the free space."""
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
    """Whether a shard and its index exist and agree in size; content is checked when read."""
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
    """Delete the shards that differ from their index; returns their names. Reads all shards."""
    dropped = []
    for shard in filter(partial(is_whole, folder), range(plan.shards)):
        path = shard_path(folder, shard)
        if manifest.file_sha256(path) != ShardIndex.read(index_path(folder, shard)).sha256:
            path.unlink()
            dropped.append(path.name)
    return dropped


class ShardEntry(TypedDict):
    """A shard in the manifest: its file, and how many rows and tokens it holds."""

    file: str
    bytes: int
    sha256: str
    rows: int
    tokens: int


class StoreManifest(TypedDict):
    """The manifest of a complete store. identity: see `Identity`; index: the shards' indices."""

    identity: dict[str, object]
    rows: int
    tokens: int
    hidden: int
    estimated_bytes: int
    target: dict[str, object]
    bytes: int
    shards: list[ShardEntry]
    index: list[manifest.FileEntry]


def finish_store(
    folder: Path, plan: layout.StorePlan, provenance: Mapping[str, object] | None
) -> StoreManifest:
    """Write the manifest of a store whose shards are all there, once; returns it."""
    with turn(folder):
        if not (folder / MANIFEST_FILE).is_file():
            paths = [index_path(folder, shard) for shard in range(plan.shards)]
            shards: list[ShardEntry] = []
            for index in map(ShardIndex.read, paths):
                tokens = sum(length for _, length in index.rows)
                shards.append(
                    {
                        "file": index.file,
                        "bytes": index.bytes,
                        "sha256": index.sha256,
                        "rows": len(index.rows),
                        "tokens": tokens,
                    }
                )
            known = plan.content()
            del known["rows_per_shard"], known["seed"]
            size = sum(entry["bytes"] for entry in shards)
            size += sum(path.stat().st_size for path in paths)
            indices = [manifest.file_entry(folder, str(path.relative_to(folder))) for path in paths]
            content = {**known, "bytes": size, "shards": shards, "index": indices}
            manifest.write_manifest(folder, "features", content, provenance)
    return manifest.read_manifest_as(StoreManifest, folder, "features")


@dataclass(frozen=True)
class StoreJob:
    """The store to write: for `heads` (name, kind, configuration) on a folder of `answers`. dtype,
    sequence_length, batch_rows, seed, domains: the training's engine.dtype, train.sequence_length,
    micro_batch, seed and domains. local_rank: selects this process's GPU. load: loads the target,
    whole, or in parts if features.source runs it elsewhere."""

    heads: tuple[tuple[str, str, Any], ...]
    target: TargetConfig
    answers: Path
    features: FeaturesConfig
    dtype: torch.dtype
    sequence_length: int
    batch_rows: int
    seed: int
    local_rank: int = 0
    domains: tuple[str, ...] = ()
    load: Callable[[TargetConfig], TargetModel] = TargetModel.load

    @property
    def folder(self) -> Path:
        return self.features.folder(self.answers)


def write_features(
    job: StoreJob,
    provenance: Mapping[str, object] | None = None,
    say: Callable[[str], None] = print,
) -> StoreManifest:
    """Write the missing shards of the store, wait for other writers, and return its manifest.
    Raises `UserError` for drafters that read no features of the target, for another store in the
    folder, and for a quota or a disk that is too small."""
    device = str(pick_device(job.target.device))
    if device == "cuda":  # each of several processes on a machine uses its own GPU
        device = f"cuda:{job.local_rank}"
    target = job.load(replace(job.target, device=device))
    needs = needs_of(job.heads, target.info)
    job.features.form(target.info)  # refuses numbers of logits that cannot be stored
    length = job.sequence_length
    data = PackedData.from_manifest(job.answers, target.info, length, domains=job.domains)
    precision = layout.precision_of(job.dtype, target.dtype)
    loading = loading_text(job.target.unusual)
    identity = job.features.identity(
        needs, target.info, job.answers, length, precision, data.domains, loading
    )
    per_token = bytes_per_token(needs, target.info, job.features.format, identity.top_logits)
    shard_bytes = int(job.features.shard_mib * MIB)
    plan = make_plan(data, identity, per_token, target.info, shard_bytes)
    plan = replace(plan, seed=job.seed)
    for line in size_table(job.heads, target.info, job.features.top_logits):
        say(line)
    say(
        f"{data.report.tokens:,} tokens in {len(data)} rows x {per_token:,.0f} bytes "
        f"({job.features.format}: {', '.join(identity.things())}) = "
        f"{gib(plan.estimated_bytes)} in {plan.shards} shards under '{job.folder}'"
    )
    plan = open_store(job.folder, plan, int(job.features.quota_gib * GIB))
    if job.features.verify:
        dropped = ", ".join(drop_damaged(job.folder, plan))
        state = f"{dropped} damaged, written again" if dropped else "none is damaged"
        say(f"checked every shard: {state}")
        plan = open_store(job.folder, plan, 0)
    stored = FeatureSpec(plan.identity.taps, plan.identity.last_hidden)
    # the order of the training's first epoch (train/data/loader.py)
    seed = job.seed if plan.seed is None else plan.seed  # the first writer's
    order = stable_permutation(len(data), seed, 0)
    if missing_shards(job.folder, plan):
        with terminable(), running(job, target, stored) as (runner, rows):
            online = OnlineFeatures(runner, stored, job.dtype)
            # what the store holds, which may be more than these drafters read
            form = replace(job.features.form(target.info), top_logits=plan.identity.top_logits)
            given = (plan, data, order, online.batch, form, online.logits, rows, say)
            Writer(job.folder, *given).run()
    return finish_store(job.folder, plan, provenance)


@contextmanager
def running(
    job: StoreJob, target: TargetModel, needs: FeatureSpec
) -> Iterator[tuple[FeatureTarget, int]]:
    """The object that runs the target, for a block, and its number of rows per pass."""
    if job.features.source == "target":
        yield target, job.batch_rows
        return
    at_once = job.features.concurrency * len(job.features.servers)
    given = (job.features, job.answers, target, needs, job.sequence_length, job.domains)
    with closing(document_target(*given)) as engine:
        # documents of a pass are requested together; rounding does not depend on its rows
        yield engine, max(job.batch_rows, at_once)


def needs_of(heads: tuple[tuple[str, str, Any], ...], info: TargetInfo) -> FeatureSpec:
    """The features that the drafters read together in training; raises `UserError` if there are
    none."""
    needs = union(spec_of(kind, config, info) for _, kind, config in heads)
    needs.check(info.num_layers)
    if not states_of(needs):
        raise UserError(
            f"{', '.join(name for name, _, _ in heads)}: nothing of the target is read in "
            "training, so there is nothing to store."
        )
    return needs


def spec_of(kind: str, config: Any, info: TargetInfo) -> FeatureSpec:
    found = get_kind(kind)
    if not found.trainable:
        raise UserError(
            f"head '{kind}' has no weights to train, so there is nothing to store or serve for it."
        )
    with torch.device("meta"):
        needs: FeatureSpec = found.drafter_class(config, info).needs
    return needs


def size_table(
    heads: tuple[tuple[str, str, Any], ...], info: TargetInfo, top_logits: int
) -> list[str]:
    """Bytes per token of every head, and of all together, in every format, as lines of text."""
    specs = [(name, spec_of(kind, config, info)) for name, kind, config in heads]
    if len(specs) > 1:
        specs.append(("all of them", needs_of(heads, info)))
    width = max(15, *(len(name) for name, _ in specs))
    lines = [f"{'bytes per token':<{width}} " + "".join(f"{fmt:>10}" for fmt in FORMATS)]
    for name, spec in specs:
        top = top_logits if spec.last_hidden or spec.logits else 0
        sizes = [bytes_per_token(spec, info, fmt, top) for fmt in FORMATS]
        lines.append(f"{name:<{width}} " + "".join(f"{size:>10,.0f}" for size in sizes))
    return lines
