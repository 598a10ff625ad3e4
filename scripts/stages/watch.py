"""`headstart watch`: tests whether a drafter still suits its target and traffic. Writes
staleness.json."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from heads.api.checkpoint import weights_file
from heads.api.errors import UserError
from inference.decoding.config import DecodeConfig
from inference.manifest import file_sha256
from inference.staleness.comparison import Comparison, learn_reference
from inference.staleness.reference import WATCH_FILE, Reference, find_reference, reference_path
from inference.staleness.result import show, summarise
from inference.staleness.scrapes import served_model
from inference.target.loading import load_tokenizer
from inference.target.model import TargetModel
from inference.verifications import read_facts
from inference.writers import only_writer
from scripts.config.schema import Settings
from scripts.run import drafters
from scripts.run.drafters import Found
from scripts.run.folder import open_folder
from scripts.run.process import console, prepare_process, say, shown
from scripts.run.prompts import bench_of, load

BATCH = 32
"""Rows decoded together, unless decode.batch_size is given. Nothing is timed."""


def run(settings: Settings) -> int:
    """Learn a reference, or watch; returns the exit status."""
    found = drafters.find_trained("watch.drafter", settings.watch.drafter, settings.run)
    batch = settings.decode.batch_size if settings.given("decode.batch_size") else BATCH
    rule = settings.decode.rule if settings.given("decode.rule") else "match"
    decode = replace(settings.decode, batch_size=batch, rule=rule)
    return (learn if settings.watch.learn else watch)(settings, found, decode)


def learn(settings: Settings, found: Found, decode: DecodeConfig) -> int:
    """Decode the prompts with the drafter's own target and write the reference."""
    config = settings.watch
    path = reference_path(config.reference or found.folder)
    prepare_process(settings.run)
    asked = drafters.asked_draft(settings)
    target, own = TargetModel.load(settings.target), drafters.draft_settings(found, decode, asked)
    prompts = load(settings).prompts
    with only_writer(path.parent, ".watch.writer.json"):
        reference = learn_reference(config, prompts, found.folder, target, own, str(path))
        reference.write(path)
    say(f"{reference.summary()}\n{shown(path)}")
    return 0


def watch(settings: Settings, found: Found, decode: DecodeConfig) -> int:
    """Compare fresh traffic with the reference; returns the exit status: 1 for an alarm, 130 after
    Ctrl-C. Raises `UserError` for a server that could not be watched to the end, unless its result
    so far, which is written, is an alarm."""
    config, weights = settings.watch, weights_file(found.folder)
    reference = find_reference(config.reference, found.folder, file_sha256(weights))
    comparison = Comparison(config, reference)
    facts: dict[str, str] = {}
    if config.running:
        source = config.running
        tokenizer = tokenizer_of(settings, reference)
        if served := served_model(config, source, reference.target.get("id", ""), tokenizer):
            facts = {"id": served}
        say(f"watching {source} for {config.seconds:g} seconds, every {config.every:g}")
        comparison.add_running(source)
    elif config.metrics:
        source = ", ".join(config.metrics)
        comparison.add_scrapes(config.metrics)
    elif config.records:
        source, facts = config.records, read_facts(Path(config.records)).get("target") or {}
        comparison.add_records(Path(source))
    else:
        source = bench_of(settings).prompts
        prepare_process(settings.run)
        target = TargetModel.load(settings.target)
        own = drafters.draft_settings(found, decode, reference.draft)
        sampling: dict[str, Any] = {"temperature": reference.temperature, **reference.sampling}
        own = replace(own, max_new_tokens=reference.tokens, **sampling)
        say(f"decoding as for the reference: {reference.shown}")
        comparison.add_decoded(load(settings).prompts, found.folder, target, own)
        facts = {"id": target.info.id, "revision": target.info.revision}
        facts |= {"quantization": settings.target.quantization, "system": config.system}
    comparison.require_fresh()
    reference = comparison.reference
    out = settings.run.directory / config.name
    # traffic is no input that could be compared, so every command watches again
    folder = open_folder(settings, out, [weights], stage_decides=True, repeats=True)
    how = (comparison.reached, comparison.unit, comparison.remarks, comparison.guaranteed)
    result = summarise(comparison.test, reference, comparison.answers, facts, source, *how)
    path = result.write(out)
    if comparison.answers:
        comparison.as_reference(facts, source).write(out / WATCH_FILE)
    failed = comparison.ended if not result.alarms else None
    if failed is None:
        folder.finish()
    show(result, console())
    say(shown(path))
    if isinstance(failed, UserError):
        raise UserError(f"{failed} The result so far is in '{shown(path)}'.")
    if failed is not None:
        return 130
    return 1 if result.alarms else 0


def tokenizer_of(settings: Settings, reference: Reference) -> Any:
    """The tokenizer that a watched server should have: that of the target on the command line, or
    of the reference's target if it is a folder here; None if neither is. Raises `UserError` if
    target.path has none."""
    if settings.given("target.path") or settings.given("target"):
        return load_tokenizer(settings.target)
    path = reference.target.get("id", "")
    if not Path(path).is_dir():
        return None
    with suppress(UserError):  # it was not asked for
        return load_tokenizer(replace(settings.target, path=path, revision=None))
    return None
