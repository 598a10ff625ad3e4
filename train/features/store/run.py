"""`write_features(...)`: from a folder of answers to a store of the target's features, in as many
processes as are started.

What is stored, how much that is, and whether there is room, is said and checked before the first
byte is written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from heads.api.errors import UserError
from heads.api.features import FeatureSpec
from heads.api.registry import get_kind
from heads.api.target_info import TargetInfo
from inference.manifest import MANIFEST_FILE, file_sha256
from inference.target.loading import TargetConfig, pick_device
from inference.target.model import TargetModel
from train.data.pack import PackedData
from train.data.permute import stable_permutation
from train.features.base import OnlineFeatures
from train.features.config import FeaturesConfig
from train.features.store import writer
from train.features.store.codec import FORMATS, bytes_per_token, states_of
from train.features.store.layout import identity_of, precision_of
from train.processes import terminable


@dataclass(frozen=True)
class StoreJob:
    """What is to be stored: for `heads` (name, kind, configuration) on a folder of `answers`.
    dtype, sequence_length, batch_rows, seed: the training's engine.dtype, train.sequence_length,
    micro_batch and seed. local_rank: picks this process's GPU."""

    heads: tuple[tuple[str, str, Any], ...]
    target: TargetConfig
    answers: Path
    features: FeaturesConfig
    dtype: torch.dtype
    sequence_length: int
    batch_rows: int
    seed: int
    local_rank: int = 0

    @property
    def folder(self) -> Path:
        return self.features.folder(self.answers)


def write_features(
    job: StoreJob,
    provenance: Mapping[str, object] | None = None,
    say: Callable[[str], None] = print,
) -> writer.StoreManifest:
    """Write what is missing of the store, wait for other writers, return its manifest. Raises
    `UserError` for drafters that read nothing of the target, for another store in the folder, and
    for a quota or a disk that is too small."""
    device = str(pick_device(job.target.device))
    if device == "cuda":  # among several on a machine with GPUs, its own
        device = f"cuda:{job.local_rank}"
    target = TargetModel.load(replace(job.target, device=device))
    needs = needs_of(job.heads, target.info)
    form = job.features.form(target.info)
    data = PackedData.from_manifest(job.answers, target.info, job.sequence_length)
    identity = identity_of(
        needs,
        target.info,
        file_sha256(job.answers / MANIFEST_FILE),
        job.sequence_length,
        precision_of(job.dtype, target.dtype),
        job.features.format,
        job.features.top_logits,
    )
    per_token = bytes_per_token(needs, target.info, job.features.format, identity.top_logits)
    shard_bytes = int(job.features.shard_mib * writer.MIB)
    plan = writer.make_plan(data, identity, per_token, target.info, shard_bytes)
    for line in size_table(job.heads, target.info, job.features.top_logits):
        say(line)
    say(
        f"{data.report.tokens:,} tokens in {len(data)} rows x {per_token:,.0f} bytes "
        f"({job.features.format}: {', '.join(identity.things())}) = "
        f"{writer.gib(plan.estimated_bytes)} in {plan.shards} shards under '{job.folder}'"
    )
    plan = writer.open_store(job.folder, plan, int(job.features.quota_gib * writer.GIB))
    if job.features.verify:
        dropped = ", ".join(writer.drop_damaged(job.folder, plan))
        state = f"{dropped} damaged, written again" if dropped else "none is damaged"
        say(f"checked every shard: {state}")
        plan = writer.open_store(job.folder, plan, 0)
    stored = FeatureSpec(plan.identity.taps, plan.identity.last_hidden)
    online = OnlineFeatures(target, stored, job.dtype)
    # the order of the training's first epoch (train/data/loader.py)
    order = stable_permutation(len(data), job.seed, 0)
    given = (plan, data, order, online.batch, form, online.logits, job.batch_rows, say)
    with terminable():
        writer.Writer(job.folder, *given).run()
    return writer.finish_store(job.folder, plan, provenance)


def needs_of(heads: tuple[tuple[str, str, Any], ...], info: TargetInfo) -> FeatureSpec:
    """What the drafters read in training together; raises `UserError` when that is nothing."""
    specs = [spec_of(kind, config, info) for _, kind, config in heads]
    union = FeatureSpec(
        taps=tuple(sorted({tap for spec in specs for tap in spec.taps})),
        last_hidden=any(spec.last_hidden for spec in specs),
        logits=any(spec.logits for spec in specs),
    )
    union.check(info.num_layers)
    if not states_of(union):
        raise UserError(
            f"{', '.join(name for name, _, _ in heads)}: nothing of the target is read in "
            "training, so there is nothing to store."
        )
    return union


def spec_of(kind: str, config: Any, info: TargetInfo) -> FeatureSpec:
    found = get_kind(kind)
    if not found.trainable:
        raise UserError(
            f"head '{kind}' has no weights to train, so there is nothing to store for it."
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
