"""`headstart watch`: does a drafter still suit its target and traffic? Writes
<run>/<name>/staleness.json; status 1 means alarm."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from heads.api.checkpoint import WEIGHTS_FILE
from heads.api.errors import UserError
from inference.decoding.config import DecodeConfig
from inference.manifest import file_sha256
from inference.staleness.comparison import Comparison, count, decode_prompts, draft_of
from inference.staleness.reference import (
    WATCH_FILE,
    DomainAnswers,
    Reference,
    find_reference,
    require_reference,
)
from inference.staleness.result import content, show, write
from inference.target.model import TargetModel
from inference.verifications import read_facts
from scripts.config.schema import Settings
from scripts.run import drafters
from scripts.run.drafters import Found
from scripts.run.folder import open_folder
from scripts.run.process import is_main_process, prepare_process, shown
from scripts.stages.measure import prompts
from scripts.stages.report import console

BATCH = 32
"""Rows decoded together unless decode.batch_size says otherwise: nothing is timed."""


def run(settings: Settings) -> int:
    """Learn a reference, or watch; returns the exit status."""
    if not is_main_process():
        return 0
    given = settings.watch.drafter
    if not given:
        raise UserError(
            "watch.drafter is missing: give the drafter's checkpoint folder, or its name in this "
            "run."
        )
    found = drafters.find(given, settings.run)
    if found.checkpoint is None:
        raise UserError(
            f"watch.drafter: '{found.name}' was not trained on this target's answers, so it cannot "
            "go stale."
        )
    weights = found.checkpoint / WEIGHTS_FILE
    if not weights.is_file():
        raise UserError(
            f"'{found.checkpoint}' has no {WEIGHTS_FILE}: it is not a trained drafter's folder."
        )
    return (learn if settings.watch.learn else watch)(settings, found, weights)


def learn(settings: Settings, found: Found, weights: Path) -> int:
    """Decode the prompts with the drafter's own target and write the reference."""
    config = settings.watch
    path = Path(config.reference or weights.with_name(WATCH_FILE))
    path = path / WATCH_FILE if path.is_dir() else path
    require_reference(path)
    prepare_process(settings.run)
    target = TargetModel.load(settings.target)
    decode = batched(drafters.draft_settings(found, settings.decode), settings)
    answers: dict[str, DomainAnswers] = {}
    chosen = prompts(settings.bench)
    for fresh in decode_prompts(config, chosen, weights.parent, target, decode, changed=False):
        count(answers, fresh)
    reference = Reference(
        target={"id": target.info.id, "revision": target.info.revision},
        drafter={"kind": found.kind, "weights_sha256": file_sha256(weights)},
        draft=draft_of(decode),
        temperature=decode.temperature,
        tokens=decode.max_new_tokens,
        tallies=answers,
        depth=decode.tree().max_depth,
        source=str(path),
        system=config.system,
    )
    reference.evidence(reference.grid())  # raises where there is too little of everything
    reference.write(path)
    for name in reference.domains:
        told = answers[name]
        print(
            f"{name}: {len(told.answers)} answers, {told.acceptance:.2f} drafted tokens accepted "
            "per pass"
        )
    print(shown(path), flush=True)
    return 0


def watch(settings: Settings, found: Found, weights: Path) -> int:
    """Compare fresh traffic with the reference, print, write staleness.json; returns the exit
    status."""
    config = settings.watch
    reference = find_reference(config.reference, weights.parent, file_sha256(weights))
    comparison = Comparison(config, reference)
    target: dict[str, str] = {}
    if config.metrics:
        source = ", ".join(config.metrics)
        comparison.add_metrics(config.metrics)
    elif config.records:
        source = config.records
        target = read_facts(Path(source)).get("target") or {}
        comparison.add_records(Path(source))
    else:
        source = str(settings.bench.prompts or settings.bench.dataset)
        target = add_decoded(settings, found, weights.parent, comparison)
    comparison.require_fresh()
    out = settings.run.directory / config.name
    folder = open_folder(settings, out, [weights], stage_decides=True)
    result = content(comparison.test, reference, comparison.answers, target, source)
    path = write(result, folder.path)
    if comparison.answers:
        comparison.as_reference(target, source).write(folder.path / WATCH_FILE)
    folder.finish()
    show(result, console())
    print(shown(path), flush=True)
    return 1 if result["alarms"] else 0


def add_decoded(
    settings: Settings, found: Found, checkpoint: Path, comparison: Comparison
) -> dict[str, str]:
    """Decode the prompts of `bench` as the reference was decoded; returns the target's facts."""
    config, reference = settings.watch, comparison.reference
    prepare_process(settings.run)
    target = TargetModel.load(settings.target)
    decode = batched(drafters.draft_settings(found, settings.decode, reference.draft), settings)
    decode = replace(decode, temperature=reference.temperature, max_new_tokens=reference.tokens)
    print(
        f"decoding as for the reference: {decode.shape} of {reference.depth}, temperature "
        f"{decode.temperature:g}, {decode.max_new_tokens} tokens",
        flush=True,
    )
    chosen = prompts(settings.bench)
    fresh = decode_prompts(config, chosen, checkpoint, target, decode, changed=True)
    comparison.add(fresh, stop=config.stop)
    return {
        "id": target.info.id,
        "revision": target.info.revision,
        "quantization": settings.target.quantization,
        "system": config.system,
    }


def batched(decode: DecodeConfig, settings: Settings) -> DecodeConfig:
    """`decode` with rows for speed, unless decode.batch_size is given."""
    asked = settings.given("decode.batch_size")
    return decode if asked else replace(decode, batch_size=BATCH)
