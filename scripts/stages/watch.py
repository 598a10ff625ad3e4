"""`headstart watch`: does a drafter still suit its target and traffic? Writes <run>/<name>/staleness.json; status 1 means alarm."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from heads.api.checkpoint import WEIGHTS_FILE, load_drafter
from heads.api.errors import UserError
from inference.decoding.config import DecodeConfig
from inference.decoding.draft import DraftSettings
from inference.decoding.engine import Engine
from inference.manifest import file_sha256
from inference.measure.prompts import to_requests
from inference.staleness.config import WatchConfig
from inference.staleness.evidence import Sums
from inference.staleness.reference import (
    WATCH_FILE,
    DomainAnswers,
    Reference,
    find_reference,
    passes_within,
    require_reference,
)
from inference.staleness.result import content, show, write
from inference.staleness.sequential_test import DriftTest
from inference.staleness.sources import Fresh, decode_fresh, read_recorded, read_scrapes, with_system
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
    if not settings.watch.drafter:
        raise UserError("watch.drafter is missing: give the drafter's checkpoint folder, or its name in this run.")
    found = drafters.find(settings.watch.drafter, settings.run)
    if found.checkpoint is None:
        raise UserError(f"watch.drafter: '{found.name}' was not trained on this target's answers, so it cannot go stale.")
    return learn(settings, found) if settings.watch.learn else watch(settings, found)


def weights(found: Found) -> Path:
    """The file with the drafter's weights; raises `UserError` where there is none."""
    assert found.checkpoint is not None
    path = found.checkpoint / WEIGHTS_FILE
    if not path.is_file():
        raise UserError(f"'{found.checkpoint}' has no {WEIGHTS_FILE}: it is not a trained drafter's folder.")
    return path


# ---- the reference -------------------------------------------------------------------------------------------------------------


def learn(settings: Settings, found: Found) -> int:
    """Decode the prompts with the drafter's own target and write the reference."""
    config = settings.watch
    assert found.checkpoint is not None
    path = Path(config.reference) if config.reference else found.checkpoint / WATCH_FILE
    path = path / WATCH_FILE if path.is_dir() else path
    require_reference(path)
    prepare_process(settings.run)
    target = TargetModel.load(settings.target)
    decode = batched(drafters.draft_settings(found, settings.decode), settings)
    tallies: dict[str, DomainAnswers] = {}
    for fresh in decoded_now(settings, found, target, decode, changed=False):
        tally(tallies, fresh)
    draft: DraftSettings = {"shape": decode.shape, "depth": decode.depth, "choices": []}
    if decode.shape in ("tree", "dynamic"):
        draft["choices"] = [list(choice) for choice in decode.choices]
        draft |= {"nodes": decode.nodes, "width": decode.width}
    reference = Reference(
        target={"id": target.info.id, "revision": target.info.revision},
        drafter={"kind": found.kind, "weights_sha256": file_sha256(weights(found))},
        draft=draft, temperature=decode.temperature, tokens=decode.max_new_tokens, tallies=tallies,
        depth=decode.tree().max_depth, source=str(path), system=config.system,
    )  # fmt: skip
    reference.evidence(reference.grid())  # says so where there is too little of everything
    reference.write(path)
    for name in reference.domains:
        told = tallies[name]
        print(f"{name}: {len(told.answers)} answers, {told.acceptance:.2f} drafted tokens accepted per pass", flush=True)
    print(shown(path), flush=True)
    return 0


# ---- watching ------------------------------------------------------------------------------------------------------------------


def watch(settings: Settings, found: Found) -> int:
    """Compare fresh traffic with the reference, print, write staleness.json; returns the exit status."""
    config = settings.watch
    assert found.checkpoint is not None
    reference = find_reference(config.reference, found.checkpoint, file_sha256(weights(found)))
    grid = reference.grid()
    test = DriftTest(grid, reference.most, reference.evidence(grid), config.tolerance, config.alarm_rate)
    tallies: dict[str, DomainAnswers] = {}
    target: dict[str, str] = {}
    if config.metrics:
        source = ", ".join(config.metrics)
        count_totals(test, reference, config)
    elif config.records:
        source, target = config.records, read_facts(Path(config.records)).get("target") or {}
        feed(test, tallies, read_recorded(Path(config.records), reference), stop=False)
    else:
        source, target = decode_and_feed(settings, found, reference, test, tallies)
    if not test.fresh:
        seen = ", ".join(map(repr, test.unknown)) or "none"
        raise UserError(
            f"no fresh answer is of a domain that the reference knows ({', '.join(reference.domains)}); found: {seen}. Give "
            "traffic of those domains, or make a reference with these by watch.learn=true."
        )
    folder = open_folder(settings, settings.run.directory / config.name, [weights(found)], stage_decides=True)
    result = content(test, reference, tallies, target, source)
    path = write(result, folder.path)
    if tallies:  # so that they can be the next reference, or be looked at one by one
        here = replace(reference, target=target, tallies=tallies, system=config.system, source=source, figures={})
        here.write(folder.path / WATCH_FILE)
    folder.finish()
    show(result, console())
    print(shown(path), flush=True)
    return 1 if result["alarms"] else 0


def decode_and_feed(
    settings: Settings, found: Found, reference: Reference, test: DriftTest, tallies: dict[str, DomainAnswers]
) -> tuple[str, dict[str, str]]:
    """Decode the prompts as the reference was decoded; returns where they are from, and the target's facts."""
    prepare_process(settings.run)
    target = TargetModel.load(settings.target)
    decode = batched(drafters.draft_settings(found, settings.decode, reference.draft), settings)
    decode = replace(decode, temperature=reference.temperature, max_new_tokens=reference.tokens)
    print(
        f"decoding as for the reference: {decode.shape} of {reference.depth}, temperature {decode.temperature:g}, "
        f"{decode.max_new_tokens} tokens",
        flush=True,
    )
    answers = decoded_now(settings, found, target, decode, changed=True)
    feed(test, tallies, answers, stop=settings.watch.stop)
    facts = {"id": target.info.id, "revision": target.info.revision, "quantization": settings.target.quantization,
             "system": settings.watch.system}  # fmt: skip
    return str(settings.bench.prompts or settings.bench.dataset), facts


def decoded_now(
    settings: Settings, found: Found, target: TargetModel, decode: DecodeConfig, changed: bool
) -> Iterable[Fresh]:
    """Decode the prompts of `bench`, in random order. changed: whether the target may be another version of the drafter's."""
    config = settings.watch
    assert found.checkpoint is not None
    chosen = with_system(prompts(settings.bench), config.system)
    random.Random(config.seed).shuffle(chosen)
    chosen = chosen[: config.max_prompts]
    drafter = load_drafter(found.checkpoint, target.info, target.weights, changed_target=changed)
    limit = target.info.max_position_embeddings
    requests = to_requests(chosen, target.tokenizer, decode, capacity=limit, overlong="skip")
    if not requests:
        raise UserError(
            f"no prompt fits into the target's {limit} positions together with an answer of {decode.max_new_tokens} tokens. Give "
            "shorter prompts."
        )
    most = passes_within(decode.max_new_tokens, decode.tree().max_depth)
    return decode_fresh(Engine(target, drafter, decode), requests, chosen, most)


def batched(decode: DecodeConfig, settings: Settings) -> DecodeConfig:
    """`decode` with rows for speed, unless decode.batch_size is given."""
    asked = settings.given("decode.batch_size")
    return decode if asked else replace(decode, batch_size=BATCH)


def feed(test: DriftTest, tallies: dict[str, DomainAnswers], answers: Iterable[Fresh], stop: bool) -> None:
    """Give the test one answer after the other. stop: end with the first alarm."""
    for fresh in answers:
        tally(tallies, fresh)
        test.add(fresh.domain, sum(fresh.passes), len(fresh.passes))
        if stop and test.alarms:
            break


def tally(tallies: dict[str, DomainAnswers], fresh: Fresh) -> None:
    """Count an answer to its domain."""
    tallies.setdefault(fresh.domain, DomainAnswers()).answers.append(fresh.passes)


def count_totals(test: DriftTest, reference: Reference, config: WatchConfig) -> None:
    """Give the test one look per scrape."""
    for totals in read_scrapes([Path(path) for path in config.metrics]):
        for domain, (accepted, passes) in totals.items():
            known = domain if domain in test.reference else max(reference.domains, key=reference.spread)
            spread, prior = reference.spread(known), test.reference[known].passes
            test.replace(domain, Sums(test.grid, accepted, passes, spread, prior))
