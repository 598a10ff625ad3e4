"""`headstart measure`: every drafter of a run, and plain decoding, on held-out prompts; writes
<run>/<name>/report.json."""

from __future__ import annotations

from pathlib import Path

from heads.api.errors import UserError
from inference.decoding.arm import Arm
from inference.measure.config import BenchConfig
from inference.measure.datasets import Loaded, load_bench_prompts
from inference.measure.run import measure
from inference.report.markdown import print_table
from inference.report.model import REPORT_FILE, read_report
from inference.target.model import TargetModel
from scripts.config.own import MeasureConfig, RunConfig
from scripts.config.schema import Settings
from scripts.run import drafters
from scripts.run.drafters import Found
from scripts.run.folder import open_folder, require_run
from scripts.run.process import console, prepare_process, say, shown


def run(settings: Settings) -> None:
    report = measure_run(settings)
    print_table(read_report(report), console())
    say(shown(report))


def measure_run(settings: Settings) -> Path:
    """Measure unless that was done and nothing has changed since; returns report.json's path."""
    out = settings.run.directory / settings.measure.name
    if not settings.measure.drafters and not settings.given("measure.kinds"):
        require_run(
            settings.run,
            "To measure in a new run, say what: measure.drafters=[<checkpoint folder>], or "
            "measure.kinds=[ngram] for drafters that need no training.",
        )
    found = chosen(settings.measure, settings.run)
    folder = open_folder(settings, out, drafters.weight_files(found), stage_decides=True)
    if not folder.skip():
        prepare_process(settings.run)
        target = TargetModel.load(settings.target)
        arms = [arm(item, target, settings) for item in found]
        bench, loaded, recording = settings.bench, load(settings.bench), settings.measure.records
        prompts, revision = loaded.prompts, loaded.revision
        measure(bench, target, arms, prompts, out, revision=revision, recording=recording)
        folder.finish()
    return out / REPORT_FILE


def chosen(config: MeasureConfig, run: RunConfig) -> list[Found]:
    """The drafters to measure, trained ones first; raises `UserError` when there are none."""
    named = [drafters.find(name, run) for name in config.drafters]
    found = named or drafters.best_of_sweeps(drafters.list_trained(run))
    found += [drafters.find(kind, run, config.heads) for kind in config.kinds]
    if not found:
        raise UserError(
            f"there is nothing to measure: '{run.directory}' has no trained drafter. Train one, or "
            "set measure.drafters."
        )
    names = [item.name for item in found]
    for name in config.drafts:
        if name not in names:
            raise UserError(
                f"measure.drafts names '{name}', which is not measured. Measured: "
                f"{', '.join(names)}."
            )
    return found


def arm(found: Found, target: TargetModel, settings: Settings) -> Arm:
    config = settings.measure
    changes = {**config.draft, **config.drafts.get(found.name, {})}
    own = drafters.decode_settings(found, settings, target, 1, changes)
    if own.shape == "none":  # a contestant drafts
        own = drafters.draft_settings(found, settings.decode, changes)
    path = shown(found.checkpoint) if found.checkpoint else ""
    return Arm(found.name, drafters.load(found, target), own, path)


def load(bench: BenchConfig) -> Loaded:
    """The prompts to measure on, and the commit of the dataset they are from."""
    return load_bench_prompts(bench.prompts, bench.dataset, bench.domains)
