"""The parts of a refresh: answers of the new target, the training on them, and tau on held-out
prompts."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
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
from inference.measure.prompts import Prompt, select_prompts, to_requests
from inference.measure.run import tau_in_rows_that_fit
from inference.target.loading import load_tokenizer
from inference.target.model import TargetModel
from scripts.config.schema import Settings
from scripts.run.drafters import Found
from scripts.run.folder import open_folder
from scripts.run.process import is_main_process
from scripts.run.prompts import bench_of, load
from scripts.stages.generate import data_of
from scripts.stages.loop.steps import hold_out_benches
from scripts.stages.measure import without_leaks
from train.config import EVAL_BATCH
from train.data.answers import AnswersManifest
from train.generate.loop import OwnDecoder
from train.generate.run import generate
from train.manifest import TrainManifest, read_training
from train.run import train


@contextmanager
def clock(path: Path, part: str) -> Iterator[None]:
    """Add the seconds of a part to those of earlier sessions in a file."""
    begun, refused = time.monotonic(), False
    try:
        yield
    except UserError:
        refused = True
        raise
    finally:
        known = read_seconds(path)
        # a refused start writes nothing, so that it does not block the corrected one
        if is_main_process() and (known or not refused):
            write_json(path, known | {part: known.get(part, 0.0) + time.monotonic() - begun})


def read_seconds(path: Path) -> dict[str, float]:
    """Part -> seconds; empty before the first part has ended or was interrupted."""
    return require_fit(dict[str, float], read_object(path), f"'{path}'") if path.is_file() else {}


def answer(
    settings: Settings, old: Found, decode: DecodeConfig, out: Path, session: Mapping[str, Any]
) -> AnswersManifest:
    """The new target's answers to some of the prompts, with the old drafter drafting. The prompts
    of `bench` are held out."""
    rows = min(settings.refresh.prompts, settings.data.limit or settings.refresh.prompts)
    asked = data_of(hold_out_benches(settings, [settings.bench]))
    data, sampling = replace(asked, limit=rows), settings.sampling
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
    """Train from the old checkpoint, in the folder of a train stage. Its config.yaml has the
    settings that the training uses: later stages read draft, learning rate and start there."""
    config = settings.refresh
    start = replace(
        settings.train.refresh,
        init_from=str(old.folder),
        other_target=True,
        old_target=config.old_target or settings.train.refresh.old_target,
        lora_rank=config.lora_rank or settings.train.refresh.lora_rank,
    )
    used = settings.put(
        train=replace(settings.train, refresh=start, goal=goal),
        optim=replace(settings.optim, lr=refreshing_rate(settings, old)),
        decode=decode,
    )
    folder = open_folder(used, out, [answers / MANIFEST_FILE], stage_decides=True)
    manifest = train(
        old.kind,
        build_config(old.kind, read_config(old.folder)["config"]),
        target=used.target,
        data=answers,
        out=out,
        config=used.train,
        features=used.features,
        engine=used.engine,
        optim=used.optim,
        schedule=used.schedule,
        decode=used.decode,
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


def measured_prompts(settings: Settings, old: Found) -> list[Prompt]:
    """The prompts of `bench` on which the old drafter was not trained; the new one's answers do not
    have them. Raises `UserError` as `without_leaks` does."""
    bench = bench_of(settings)
    prompts, _ = without_leaks(load(settings), bench, [old], load_tokenizer(settings.target))
    return select_prompts(prompts, bench.prompts_per_domain, bench.seed)


def measure_tau(
    settings: Settings, decode: DecodeConfig, prompts: Sequence[Prompt], checkpoint: Path
) -> TauEstimate:
    """tau of a checkpoint with the new target on `prompts`."""
    target, drafter = load_pair(settings, checkpoint)
    limit = target.info.max_position_embeddings
    rows = replace(decode, batch_size=settings.train.eval_batch)
    requests = to_requests(prompts, target.tokenizer, rows, capacity=limit, overlong="skip")
    if not requests:
        raise UserError(
            f"no prompt of bench fits into the target's {limit} positions with its answer. Lower "
            "decode.max_new_tokens."
        )
    return tau_in_rows_that_fit(target, drafter, requests, rows, EVAL_BATCH)[0]
