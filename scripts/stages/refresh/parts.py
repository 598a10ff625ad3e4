"""The parts of a refresh: answers of the new target, the training on them, and tau on held-out
prompts."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from heads.api.checkpoint import build_config, load_drafter, read_config
from heads.api.errors import UserError
from heads.api.reading import read_object, require_fit
from inference.decoding.config import DecodeConfig
from inference.decoding.draft_file import DRAFT_KEYS
from inference.decoding.engine import Engine
from inference.integrity import require_unchanged
from inference.manifest import MANIFEST_FILE, write_json
from inference.measure.metrics import TauEstimate
from inference.measure.prompts import select_prompts, to_requests
from inference.measure.run import quick_tau
from inference.target.model import TargetModel
from scripts.config.schema import Settings
from scripts.run.drafters import Found
from scripts.run.folder import open_folder
from scripts.run.process import is_main_process
from scripts.run.prompts import load
from scripts.stages.generate import data_of
from train.data.answers import AnswersManifest
from train.generate.loop import OwnDecoder
from train.generate.run import generate
from train.manifest import TrainManifest, read_training
from train.run import train


@contextmanager
def clock(path: Path, part: str) -> Iterator[None]:
    """Write the seconds of a part to a file, unless an earlier session has finished it."""
    begun = time.monotonic()
    yield
    known = read_seconds(path)
    if part not in known and is_main_process():
        write_json(path, known | {part: time.monotonic() - begun})


def read_seconds(path: Path) -> dict[str, float]:
    """Part -> seconds; empty before the first part has ended."""
    return require_fit(dict[str, float], read_object(path), f"'{path}'") if path.is_file() else {}


def answer(
    settings: Settings, old: Found, decode: DecodeConfig, out: Path, session: Mapping[str, Any]
) -> AnswersManifest:
    """The new target's answers to some of the prompts, with the old drafter drafting."""
    rows = min(settings.refresh.prompts, settings.data.limit or settings.refresh.prompts)
    data, sampling = replace(data_of(settings), limit=rows), settings.sampling
    backend = None
    if sampling.chosen_backend == "own" and not (out / MANIFEST_FILE).is_file():
        target, drafter = load_pair(settings, old.folder)
        draft = {key: getattr(decode, key) for key in DRAFT_KEYS}
        backend = OwnDecoder(Engine(target, drafter, replace(sampling, **draft)))
    return generate(
        settings.generate, data, sampling, settings.target, out, session, backend=backend
    )


def load_pair(settings: Settings, checkpoint: Path) -> tuple[TargetModel, Any]:
    """The new target, and a drafter of the old target loaded for it."""
    require_unchanged(checkpoint)
    target = TargetModel.load(settings.target)
    return target, load_drafter(checkpoint, target.info, target.weights, changed_target=True)


def train_on(
    settings: Settings, old: Found, decode: DecodeConfig, answers: Path, out: Path, goal: float
) -> TrainManifest:
    """Train from the old checkpoint, in the folder of a train stage."""
    config = settings.refresh
    start = replace(
        settings.train.refresh,
        init_from=str(old.folder),
        other_target=True,
        old_target=config.old_target,
        lora_rank=config.lora_rank,
    )
    folder = open_folder(settings, out, [answers / MANIFEST_FILE], stage_decides=True)
    manifest = train(
        old.kind,
        build_config(old.kind, read_config(old.folder)["config"]),
        target=settings.target,
        data=answers,
        out=out,
        config=replace(settings.train, refresh=start, goal=goal),
        features=settings.features,
        engine=settings.engine,
        optim=replace(settings.optim, lr=refreshing_rate(settings, old)),
        schedule=settings.schedule,
        decode=decode,
        provenance=folder.session,
    )
    if not folder.complete:
        folder.finish()
    return manifest


def refreshing_rate(settings: Settings, old: Found) -> float:
    """The learning rate of a training that continues from `old`: the given one, or half of its own
    rate, if that is known."""
    if settings.given("optim.lr") or not old.stage_folder:
        return settings.optim.lr
    return 0.5 * float(old.trained_with("optim").get("lr", settings.optim.lr))


def goal_of(settings: Settings, old: Found) -> float:
    """The tau at which training ends; 0 if only the budget ends it."""
    config, folder = settings.refresh, old.stage_folder
    if config.until == "budget":
        return 0.0
    if config.tau:
        return config.tau
    if folder is None or not (folder / MANIFEST_FILE).is_file():
        raise UserError(
            f"the training of '{old.checkpoint}' is not at hand, so the tau that it had is not "
            "known. Give the tau to reach as refresh.tau (its card says what was measured), or set "
            "refresh.until=budget."
        )
    best = read_training(folder)["best"]["tau"]
    if best is None:
        raise UserError(
            f"the training in '{folder}' did not measure tau. Give refresh.tau, or set "
            "refresh.until=budget."
        )
    return config.restore * float(best)


def measure_tau(settings: Settings, decode: DecodeConfig, checkpoint: Path) -> TauEstimate:
    """tau of a checkpoint with the new target, on the prompts of `bench`."""
    target, drafter = load_pair(settings, checkpoint)
    bench, limit = settings.bench, target.info.max_position_embeddings
    prompts = select_prompts(load(settings).prompts, bench.prompts_per_domain, bench.seed)
    rows = replace(decode, batch_size=settings.train.eval_batch)
    requests = to_requests(prompts, target.tokenizer, rows, capacity=limit, overlong="skip")
    if not requests:
        raise UserError(
            f"no prompt of bench fits into the target's {limit} positions with its answer. Lower "
            "decode.max_new_tokens."
        )
    return quick_tau(target, drafter, requests, rows)
