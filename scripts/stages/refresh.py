"""`headstart refresh`: the shortest training that makes a drafter fit a changed target. Writes
<run>/refresh/refresh.json.

The new target answers a few hundred prompts, sped up by the old drafter; training goes on from the
old checkpoint on these answers and ends once tau is what it was, or when every answer has been read
as often as allowed. Folders are those of the other stages: <run>/generate, <run>/train/<drafter>
(its best/ is the refreshed drafter), and repeating the command continues an interrupted one.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from heads.api.checkpoint import CONFIG_FILE, WEIGHTS_FILE, build_config, load_drafter, read_config
from heads.api.errors import UserError
from inference.decoding.config import DecodeConfig
from inference.decoding.engine import Engine
from inference.decoding.requests import Request
from inference.manifest import MANIFEST_FILE, read_manifest, write_json
from inference.measure.metrics import TauEstimate
from inference.measure.prompts import select_prompts, to_requests
from inference.measure.run import quick_tau
from inference.target.model import TargetModel
from scripts.config.schema import Settings
from scripts.run import drafters
from scripts.run.drafters import Found
from scripts.run.folder import open_folder
from scripts.run.folder import read_config as read_stage_config
from scripts.run.process import is_main_process, prepare_process, shown
from scripts.stages.generate import with_benches
from scripts.stages.measure import prompts
from train.data.answers import AnswersManifest
from train.generate.loop import OwnDecoder
from train.generate.run import generate
from train.manifest import TrainManifest
from train.refresh import RefreshConfig
from train.run import train

REFRESH_FILE, SECONDS_FILE = "refresh.json", "seconds.json"


def run(settings: Settings) -> None:
    """Refresh, continuing an interrupted folder; a complete one is only shown again."""
    config = settings.refresh
    if not config.drafter:
        raise UserError(
            "refresh.drafter is missing: give the old drafter's checkpoint folder, or its name in "
            "this run."
        )
    if settings.given("head"):
        raise UserError(
            "head=... is given, but a refresh keeps the kind and settings of refresh.drafter. "
            "Leave it out."
        )
    old = drafters.find(config.drafter, settings.run)
    if old.checkpoint is None or not (old.checkpoint / WEIGHTS_FILE).is_file():
        raise UserError(
            f"refresh.drafter: '{config.drafter}' has no weights, so there is nothing to refresh."
        )
    trained = settings.run.directory / "train" / (settings.run.drafter or old.kind)
    if trained.resolve() in (old.checkpoint.resolve(), old.checkpoint.resolve().parent):
        raise UserError(
            f"'{trained}' is the old drafter itself, which a refresh does not write over. Choose "
            "another run.name or run.drafter."
        )
    out = settings.run.directory / "refresh"
    folder = open_folder(
        settings, out, [old.checkpoint / name for name in (CONFIG_FILE, WEIGHTS_FILE)]
    )
    if not folder.complete:
        prepare_process(settings.run)
        content = refresh(settings, old, trained, folder.session)
        if is_main_process():
            write_json(out / REFRESH_FILE, content)
        folder.finish()
    if is_main_process():
        print(summary(json.loads((out / REFRESH_FILE).read_text(encoding="utf-8"))), flush=True)


def refresh(
    settings: Settings, old: Found, trained: Path, session: Mapping[str, Any]
) -> dict[str, Any]:
    """Generate, train, measure before and after; returns the content of refresh.json."""
    decode = drafters.draft_settings(old, settings.decode)
    answers = settings.run.directory / "generate"
    spent = PartSeconds(settings.run.directory / "refresh" / SECONDS_FILE)
    with spent.on("generate"):
        made = answer(settings, old, decode, answers, session)
    goal = goal_of(settings, old)
    with spent.on("train"):
        manifest = train_on(settings, old, decode, answers, trained, goal)
    assert old.checkpoint is not None
    with spent.on("measure"):
        before, after = (
            measure_tau(settings, decode, path)
            for path in (old.checkpoint, trained / manifest["checkpoint"])
        )
    return {
        "format": 1,
        "drafter": {
            "old": shown(old.checkpoint),
            "new": shown(trained / manifest["checkpoint"]),
            "kind": old.kind,
        },
        "target": {"old": read_config(old.checkpoint)["target"], "new": manifest["target"]},
        "settings": asdict(settings.refresh)
        | {
            "lr": manifest["settings"]["optim"]["lr"],
            "draft": decode.shape,
            "temperature": decode.temperature,
            "rule": decode.rule,
        },
        "before": asdict(before),
        "after": asdict(after),
        "goal": goal,
        "ended_by": manifest["ended_by"],
        "cost": {
            "answers": made["counts"]["done"],
            "answer_tokens": made["counts"]["tokens"],
            "steps": manifest["steps"],
            "training_tokens": manifest["tokens"],
            "training_seconds": manifest["seconds"],
            "seconds": spent.seconds,
        },
    }


class PartSeconds:
    """Seconds by part over all sessions, kept in a file. A part that was killed half-way is not
    counted."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.seconds: dict[str, float] = (
            json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        )

    @contextmanager
    def on(self, part: str) -> Iterator[None]:
        """Count what happens inside to `part`, unless it has been counted."""
        begun = time.monotonic()
        yield
        if part not in self.seconds and is_main_process():
            self.seconds[part] = time.monotonic() - begun
            write_json(self.path, self.seconds)


# The parts


def answer(
    settings: Settings, old: Found, decode: DecodeConfig, out: Path, session: Mapping[str, Any]
) -> AnswersManifest:
    """The new target's answers to some of the prompts, drafted for by the old drafter; returns the
    manifest."""
    rows = min(settings.refresh.prompts, settings.data.limit or settings.refresh.prompts)
    data = with_benches(replace(settings.data, limit=rows))
    if settings.sampling.chosen_backend != "own" or (out / MANIFEST_FILE).is_file():
        return generate(
            settings.generate, data, settings.sampling, settings.target, out, provenance=session
        )
    assert old.checkpoint is not None
    target = TargetModel.load(settings.target)
    drafter = load_drafter(old.checkpoint, target.info, target.weights, changed_target=True)
    draft = {key: getattr(decode, key) for key in drafters.DRAFT_KEYS}
    backend = OwnDecoder(Engine(target, drafter, replace(settings.sampling, **draft)))
    return generate(
        settings.generate,
        data,
        settings.sampling,
        settings.target,
        out,
        provenance=session,
        backend=backend,
    )


def train_on(
    settings: Settings, old: Found, decode: DecodeConfig, answers: Path, out: Path, goal: float
) -> TrainManifest:
    """Train from the old checkpoint; returns the manifest. The folder is a train stage's: other
    stages find the drafter in it."""
    assert old.checkpoint is not None
    chosen = settings.refresh
    start = RefreshConfig(str(old.checkpoint), True, chosen.old_target, chosen.lora_rank)
    config = replace(settings.train, refresh=start, goal=goal)
    folder = open_folder(settings, out, [answers / MANIFEST_FILE], stage_decides=True)
    manifest = train(
        old.kind,
        build_config(old.kind, read_config(old.checkpoint)["config"]),
        target=settings.target,
        data=answers,
        out=out,
        config=config,
        features=settings.features,
        engine=settings.engine,
        optim=replace(settings.optim, lr=rate(settings, old)),
        schedule=settings.schedule,
        decode=decode,
        provenance=folder.session,
    )
    if not folder.complete:
        folder.finish()
    return manifest


def rate(settings: Settings, old: Found) -> float:
    """The learning rate: the one that is given, else half of what the old drafter was trained with,
    as far as that is known."""
    if settings.given("optim.lr") or old.stage_folder is None:
        return settings.optim.lr
    return 0.5 * float(
        (read_stage_config(old.stage_folder).get("optim") or {}).get("lr", settings.optim.lr)
    )


def goal_of(settings: Settings, old: Found) -> float:
    """The tau at which training ends; 0 where only the budget ends it."""
    config = settings.refresh
    if config.until == "budget":
        return 0.0
    if config.tau:
        return config.tau
    folder = old.stage_folder
    if folder is None or not (folder / MANIFEST_FILE).is_file():
        raise UserError(
            f"the training of '{old.checkpoint}' is not at hand, so the tau that it had is not "
            "known. Give the tau to reach as "
            "refresh.tau (its card says what was measured), or set refresh.until=budget."
        )
    best = read_manifest(folder, "train")["best"]["tau"]
    if best is None:
        raise UserError(
            f"the training in '{folder}' did not measure tau. Give refresh.tau, or set "
            "refresh.until=budget."
        )
    return config.restore * float(best)


def measure_tau(settings: Settings, decode: DecodeConfig, checkpoint: Path) -> TauEstimate:
    """tau of a checkpoint with the new target on the prompts of `bench`."""
    target = TargetModel.load(settings.target)
    drafter = load_drafter(checkpoint, target.info, target.weights, changed_target=True)
    rows = replace(decode, batch_size=settings.train.eval_batch)
    return quick_tau(target, drafter, requests(settings, target, rows), rows)


def requests(settings: Settings, target: TargetModel, decode: DecodeConfig) -> list[Request]:
    """The prompts of `bench`, rendered: as many per domain as it says."""
    chosen = select_prompts(
        prompts(settings.bench), settings.bench.prompts_per_domain, settings.bench.seed
    )
    limit = target.info.max_position_embeddings
    found = to_requests(chosen, target.tokenizer, decode, capacity=limit, overlong="skip")
    if not found:
        raise UserError(
            f"no prompt of bench fits into the target's {limit} positions with its answer. Lower "
            "decode.max_new_tokens."
        )
    return found


def summary(content: Mapping[str, Any]) -> str:
    """What came out and what it cost, for people."""
    cost, before, after = content["cost"], content["before"], content["after"]
    total = f"{cost['steps']} steps over {cost['training_tokens']} tokens"
    goal = f", of {content['goal']:.2f} asked for in training" if content["goal"] else ""
    seconds = ", ".join(f"{part} {value:.0f} s" for part, value in cost["seconds"].items())
    return (
        f"tau on held-out prompts: {_tau(before)} before, {_tau(after)} after{goal} (ended by: "
        f"{content['ended_by']})\n"
        f"cost: {cost['answers']} answers ({cost['answer_tokens']} tokens), {total}; {seconds}\n"
        f"{content['drafter']['new']}"
    )


def _tau(found: Mapping[str, Any]) -> str:
    return f"{found['tau']:.2f} [{found['ci95'][0]:.2f}, {found['ci95'][1]:.2f}]"
