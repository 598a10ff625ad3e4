"""Opens the configured source of features: a store, feature servers, or other processes of the launch."""

from __future__ import annotations

from pathlib import Path

import torch

from heads.api.errors import UserError
from heads.api.features import FeatureSpec
from inference.manifest import MANIFEST_FILE, file_sha256
from train.data.loader import StepLoader
from train.feature_fetch import Source, ThreadedSource
from train.features import DescribedTarget, FeaturesConfig
from train.store.layout import identity_of, precision_of
from train.store.reader import StoreReader


def make_source(
    config: FeaturesConfig,
    target: DescribedTarget,
    needs: FeatureSpec,
    dtype: torch.dtype,
    answers: Path,
    loader: StepLoader,
) -> Source:
    """The source for a training of a drafter with `needs` on `answers`; raises `UserError` when it does not fit or is not there."""
    form = config.form(target.info)
    precision = precision_of(dtype, target.dtype)
    if config.mode == "store":
        wanted = identity_of(
            needs,
            target.info,
            file_sha256(answers / MANIFEST_FILE),
            loader.data.sequence_length,
            precision,
            config.format,
            config.top_logits,
        )
        reader = StoreReader(config.folder(answers), wanted, config.wait_seconds)
        return ThreadedSource(reader.fetch, form, threads=1)
    if config.mode == "remote":
        from train.remote_client import RemoteClient

        client = RemoteClient(config, target.info, precision, needs, form)
        return ThreadedSource(client.fetch, form, threads=2 * len(config.servers))
    if config.mode == "group":
        from train.feature_group import GroupSource

        return GroupSource(config, target, precision, needs, form)
    raise UserError(f"features.mode={config.mode} has no source of its own.")
