"""Opens the configured source of features."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from heads.api.drafter import TrainableDrafter
from heads.api.errors import UserError
from heads.api.features import FeatureSpec
from inference.target.model import TargetModel
from train.data.loader import PackedBatch, StepLoader
from train.features.base import Features, FeatureTarget, OnlineFeatures
from train.features.config import FeaturesConfig
from train.features.document_target import document_target
from train.features.fetch import FetchedFeatures, Source, ThreadedSource
from train.features.group import GroupSource
from train.features.remote import wire
from train.features.remote.client import RemoteClient
from train.features.store.batches import Content, batch_on, to_cpu, top_word
from train.features.store.layout import precision_of
from train.features.store.reader import StoreReader


@torch.no_grad()
def require_logits_only(
    drafter: TrainableDrafter, config: FeaturesConfig, target: FeatureTarget, packed: PackedBatch
) -> None:
    """Raise `UserError` if features.top_logits cannot replace the last hidden state; for this, the
    drafter's loss is tried once on zeros."""
    form, needs = config.form(target.info), drafter.needs
    batch = batch_on(packed, target.device)
    shape, device = batch.tokens.shape, target.device
    if needs.taps:
        batch.taps = torch.zeros(*shape, len(needs.taps), form.hidden, device=device)
    batch.last_hidden = torch.zeros(*shape, 2 * form.top_logits + 1, device=device)
    batch.target_logits = top_word(form) if needs.logits else None
    try:
        drafter.loss(batch)
    except (RuntimeError, AssertionError, ValueError, TypeError) as error:
        raise UserError(
            f"features.top_logits={config.top_logits}: kind '{drafter.kind}' reads the target's "
            "last hidden state itself, which the largest logits cannot replace. Set "
            "features.top_logits=0."
        ) from error


def fetch_from(
    target: FeatureTarget, dtype: torch.dtype, ask: wire.Ask, packed: PackedBatch
) -> Content:
    """The features of a batch, in the requested form, on the CPU."""
    return to_cpu(wire.compute(target, dtype, ask, packed)[0])


def make_features(
    config: FeaturesConfig,
    target: TargetModel,
    needs: FeatureSpec,
    dtype: torch.dtype,
    *,
    answers: Path,
    loader: StepLoader,
    steps: int,
    on_policy: bool = False,
    loading: str = "",
) -> Features:
    """The configured source for a training of `steps` steps on `answers`. on_policy: whether rows
    are rewritten during training, so that no store has their features. loading: how the target is
    loaded (`inference.target.settings.loading_text`). Raises `UserError` for
    settings that do not fit together."""
    online = OnlineFeatures(target, needs, dtype)
    if config.mode == "online":
        return online
    if on_policy and config.mode in ("store", "responses"):
        raise UserError(
            "train.on_policy.share is above 0, so that rows change while they are trained, but "
            f"features.mode={config.mode} deals features of rows that were known beforehand. Use "
            "features.mode=online, remote, vllm, sglang or group."
        )
    form, precision = config.form(target.info), precision_of(dtype, target.dtype)
    identity = target.info, precision, loading
    source: Source
    pinned = target.device.type == "cuda"
    if config.mode == "store":
        length, domains = loader.data.sequence_length, loader.data.domains
        wanted = config.identity(needs, target.info, answers, length, precision, domains, loading)
        reader = StoreReader(config.folder(answers), wanted, config.wait_seconds)
        source = ThreadedSource(reader.fetch, form, 1, reader.stop, pinned)
    elif config.mode == "remote":
        client, threads = RemoteClient(config, *identity, needs), len(config.servers)
        source = ThreadedSource(client.fetch, form, 2 * threads, client.stop, pinned)
    elif config.mode in ("vllm", "sglang", "responses"):
        length = loader.data.sequence_length
        engine = document_target(config, answers, target, needs, length, loader.data.domains)
        fetch = partial(fetch_from, engine, dtype, wire.Ask.of(needs, form))
        source = ThreadedSource(fetch, form, 1 + config.ahead, engine.close, pinned)
    else:
        source = GroupSource(config, target, precision, loading, needs)
    given = (online.logits, target.device, dtype, loader, config.ahead)
    return FetchedFeatures(source, needs, *given, last_step=steps - 1)
