"""`headstart measure`: measures every drafter of a run and plain decoding on held-out prompts or,
with bench.server, a running server. Writes <run>/<name>/report.json."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from heads.api.errors import UserError
from inference.decoding.arm import Arm
from inference.measure.config import BenchConfig, LeakFacts, Provenance, process_facts
from inference.measure.datasets import Loaded
from inference.measure.prompts import Prompt
from inference.measure.run import measure
from inference.measure.serving.run import measure_server
from inference.report.markdown import print_table
from inference.report.model import REPORT_FILE, read_report
from inference.target.loading import TargetConfig, load_tokenizer
from inference.target.model import TargetModel
from scripts.config.schema import Settings
from scripts.config.stage_configs import MeasureConfig, RunConfig
from scripts.run import drafters
from scripts.run.drafters import Found
from scripts.run.folder import StageFolder, open_folder, require_run
from scripts.run.process import console, prepare_process, say, say_what_debug_means, shown
from scripts.run.prompts import bench_of, load, prompt_files
from train.data.dedup.leaks import Leaks, find_leaks


def run(settings: Settings) -> None:
    report = measure_run(settings)
    print_table(read_report(report), console())
    say_what_debug_means(settings)
    say(shown(report))


def measure_run(
    settings: Settings, load_target: Callable[[TargetConfig], TargetModel] = TargetModel.load
) -> Path:
    """Measure, unless a measurement exists and nothing has changed since; returns report.json's
    path."""
    out = settings.run.directory / settings.measure.name
    if settings.bench.server:
        return measure_running(settings, out)
    if not settings.measure.drafters and not settings.given("measure.kinds"):
        require_run(
            settings.run,
            "To measure in a new run, say what: measure.drafters=[<checkpoint folder>], or "
            "measure.kinds=[ngram] for drafters that need no training.",
        )
    found, bench = chosen(settings.measure, settings.run), bench_of(settings)
    files = [*drafters.weight_files(found), *prompt_files(bench.prompts)]
    untrained = drafters.described(found)
    folder = open_folder(
        settings, out, files, drafters=untrained, stage_decides=True, may_refuse=True
    )
    if not folder.skip():
        prepare_process(settings.run)
        target = load_target(settings.target)
        arms = [arm(item, target, settings) for item in found]
        loaded, recording = load(settings), settings.measure.records
        prompts, leaks = without_leaks(loaded, bench, found, target.tokenizer)
        measure(
            bench,
            target,
            arms,
            prompts,
            out,
            provenance=provenance(folder),
            revision=loaded.revision,
            recording=recording,
            leaks=leaks,
            accepted=folder.write,
        )
        folder.finish()
    return out / REPORT_FILE


def measure_running(settings: Settings, out: Path) -> Path:
    """Measure the server of `bench.server` instead of drafters; returns report.json's path. The
    target is not loaded; only its tokenizer is, if messages have to be rendered."""
    bench = bench_of(settings)
    files = prompt_files(bench.prompts)
    folder = open_folder(settings, out, files, stage_decides=True, may_refuse=True)
    if not folder.skip():
        renders = bench.serving.api == "completions"
        tokenizer = load_tokenizer(settings.target) if renders else None
        measure_server(
            bench,
            settings.decode,
            load(settings),
            out,
            provenance=provenance(folder),
            tokenizer=tokenizer,
            accepted=folder.write,
        )
        folder.finish()
    return out / REPORT_FILE


def provenance(folder: StageFolder) -> Provenance:
    """The command, versions and commit of a report."""
    return {**process_facts(), "git": folder.session["git"]}


def without_leaks(
    loaded: Loaded, bench: BenchConfig, found: Sequence[Found], tokenizer: Any
) -> tuple[list[Prompt], LeakFacts]:
    """The prompts on which none of the drafters was trained, and facts about the comparison. Raises
    `UserError` if most prompts were trained on, because the result would show what was learned by
    heart."""
    answers = {item.name: drafters.answers_of(item) for item in found if item.has_weights}
    known = {name: folders for name, folders in answers.items() if folders is not None}
    folders = sorted({folder for several in known.values() for folder in several})
    named = [one for one in loaded.prompts if not bench.domains or one.domain in bench.domains]
    leaks = find_leaks(named, folders, tokenizer) if folders else Leaks()
    facts: LeakFacts = {
        "trained_on": {name: [shown(one) for one in several] for name, several in known.items()},
        "unknown": sorted(set(answers) - set(known)),
        "rows": leaks.rows,
        "prompts": len(named),
        "exact": len(leaks.exact),
        "near": len(leaks.near),
        "left_out": sorted(leaks.all),
    }
    if not leaks.all:
        return loaded.prompts, facts
    counts = f"{len(leaks.exact)} exactly, {len(leaks.near)} nearly"
    if len(named) - len(leaks.all) < max(2, len(named) / 2):
        trained = ", ".join(known)
        raise UserError(
            f"{len(leaks.all)} of the {len(named)} prompts of '{loaded.source}' were trained on "
            f"({counts}) by {trained}: answers in {', '.join(map(shown, folders))}. Such a "
            "measurement says nothing about other prompts. Give prompts that were not trained on, "
            "or none: bench=own takes those that `generate` holds out of the data."
        )
    say(f"left out: {len(leaks.all)} of {len(named)} prompts, which were trained on ({counts})")
    return [one for one in loaded.prompts if one.id not in leaks.all], facts


def chosen(config: MeasureConfig, run: RunConfig) -> list[Found]:
    """The drafters to measure, trained ones first; raises `UserError` if there are none."""
    named = [drafters.find(name, run) for name in config.drafters]
    found = named or drafters.best_of_sweeps(drafters.list_trained(run))
    found += [drafters.find(kind, run, config.heads) for kind in config.kinds]
    if not found:
        raise UserError(
            f"there is nothing to measure: '{run.directory}' has no trained drafter. Train one, or "
            "set measure.drafters."
        )
    require_measured(config, [item.name for item in found])
    return found


def require_measured(config: MeasureConfig, names: Sequence[str]) -> None:
    """Raise `UserError` if `measure.drafts` names a drafter that is not measured."""
    for name in config.drafts:
        if name not in names:
            raise UserError(
                f"measure.drafts names '{name}', which is not measured. Measured: "
                f"{', '.join(names)}. Choose of these, or leave the draft out: "
                f"'~measure.drafts.{name}'."
            )


def arm(found: Found, target: TargetModel, settings: Settings) -> Arm:
    """A drafter as it is measured: loaded, with the draft of `measure.draft`, then its own of
    `measure.drafts`. A kind without a checkpoint that cannot fill a dartree gets a dynamic tree.
    Raises `UserError` for weights or settings that do not fit."""
    config = settings.measure
    changes = {**config.draft, **config.drafts.get(found.name, {})}
    own = drafters.decode_settings(found, settings, target, 1, changes)
    if own.shape == "none":  # a measured drafter must draft
        own = drafters.draft_settings(found, settings.decode, changes)
    path = shown(found.checkpoint) if found.checkpoint else ""
    drafter = drafters.load(found, target)
    beside = not found.checkpoint and found.name not in config.drafts
    if own.shape == "dartree" and beside and not getattr(drafter, "one_pass", False):
        # it was requested for the trained drafters; otherwise the whole measurement would be
        # refused
        say(f"{found.name} drafts dynamic trees: it has no distributions for a dartree")
        own = replace(own, shape="dynamic")
    return Arm(found.name, drafter, own, path)
