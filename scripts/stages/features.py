"""`headstart features`: writes the target's features for a training to disk once, or serves them to
trainings elsewhere.

Writing: <run>/features/<format>/ contains everything that `head` (and features.heads) reads of the
target. If the same command runs in several processes, started by a launcher or by hand, they share
the work. If it is repeated, it writes what is missing. Serving (features.serve=true): a feature
server runs until it is stopped. features.source=vllm or sglang: servers of that engine run the
target in both cases.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from heads.api.errors import UserError
from heads.api.features import FeatureSpec
from inference.manifest import MANIFEST_FILE
from inference.target.loading import TargetConfig
from inference.target.model import TargetModel
from inference.target.settings import loading_text
from inference.writers import turn
from scripts.config.schema import Settings, load_settings
from scripts.run.folder import open_folder, overwrites, require_answers
from scripts.run.process import is_main_process, prepare_process, shown
from train.features.base import FeatureTarget
from train.features.document_target import document_target
from train.features.remote.server import serve
from train.features.store.claims import Claims
from train.features.store.writer import StoreJob, gib, needs_of, write_features
from train.target.parts import load_parts

Head = tuple[str, str, Any]
"""(name, kind, configuration) of a head whose features are stored."""


def run(settings: Settings) -> None:
    """Write the store, or serve."""
    prepare_process(settings.run)
    if settings.features.serve:
        features = settings.features
        engine = features.source != "target"
        heads = all_heads(settings) if features.heads or engine else ()
        target = loader(settings)(settings.target)
        needs = needs_of(heads, target.info) if heads else FeatureSpec()
        runner: FeatureTarget = target
        if engine:
            length = settings.train.sequence_length
            answers = require_answers(settings) if features.source == "responses" else Path()
            runner = document_target(features, answers, target, needs, length)
        serve(
            runner,
            features,
            settings.engine.dtype,
            needs,
            say,
            loading_text(settings.target.unusual),
        )
        return
    write(settings, all_heads(settings))


def write(settings: Settings, heads: tuple[Head, ...]) -> None:
    """Write the store with everything that `heads` read."""
    answers = require_answers(settings)
    job = StoreJob(
        heads=heads,
        target=settings.target,
        answers=answers,
        features=settings.features,
        dtype=settings.engine.dtype,
        sequence_length=settings.train.sequence_length,
        batch_rows=settings.train.micro_batch,
        seed=settings.train.seed,
        local_rank=int(os.environ.get("LOCAL_RANK", "0")),
        domains=settings.train.domains,
        load=loader(settings),
    )
    with turn(job.folder):  # other writers may be starting at the same moment
        if overwrites(settings.run, job.folder) and is_main_process():
            require_no_writers(job.folder)
        inputs = [answers / MANIFEST_FILE]
        folder = open_folder(settings, job.folder, inputs, stage_decides=True, several=True)
    manifest = write_features(job, folder.session if folder.record.sessions else None, say)
    folder.finish()
    source = settings.features.source
    say(
        f"{shown(job.folder)}: {manifest['rows']} rows, {manifest['tokens']:,} tokens, "
        f"{gib(manifest['bytes'])} in {len(manifest['shards'])} shards. Train on it with "
        f"features=store{'' if source == 'target' else f' features.source={source}'} and the same "
        "settings."
    )


def loader(settings: Settings) -> Callable[[TargetConfig], TargetModel]:
    """How this process loads the target: in parts if that is requested and an engine runs the
    target."""
    features = settings.features
    parts = features.source != "target" and features.trainer_target == "parts"
    return partial(load_parts, norm=True) if parts else TargetModel.load


def require_no_writers(folder: Path) -> None:
    """Raise `UserError` while processes write to a store that is to be deleted."""
    writing = Claims(folder).all()
    if writing:
        who = ", ".join(str(writer) for writer in writing.values())
        raise UserError(
            f"run.overwrite: '{folder}' is not deleted while others write to it: {who}. Wait for "
            "them or end them."
        )


def all_heads(settings: Settings) -> tuple[Head, ...]:
    """`head` and the heads named in features.heads. These are as their options give them: what a
    recipe or the command line sets in `head` is for that kind."""
    found = [(str(settings.choices["head"]), settings.head)]
    place = [item for item in settings.overrides if item.key_or_group.split(".")[0] == "run"]
    for name in settings.features.heads:
        found.append((name, load_settings(settings.stage, [*place, f"head={name}"]).head))
    return tuple((name, head.kind, head.config) for name, head in found)


def say(text: str) -> None:
    """Print; processes of a launch add their rank."""
    rank = os.environ.get("RANK", "0")
    print(text if rank == "0" else f"process {rank}: {text}", flush=True)
