"""`headstart measure`: every drafter of a run, and plain decoding, on held-out prompts; writes <run>/<name>/report.json."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from heads.api.checkpoint import CONFIG_FILE, WEIGHTS_FILE
from heads.api.errors import UserError
from inference.folders import require_folder_name
from inference.verifications import RecordsConfig
from scripts import drafters
from scripts.drafters import Found
from scripts.run import RunConfig, is_main_process, open_folder, prepare_process, shown

if TYPE_CHECKING:
    from inference.decoding.arm import Arm
    from inference.measure.config import BenchConfig
    from inference.measure.datasets import Loaded
    from inference.measure.prompts import Prompt
    from inference.target.model import TargetModel
    from scripts.config import Settings


@dataclass(frozen=True)
class MeasureConfig:
    """Which drafters are measured, and under which name the measurement is kept."""

    name: str = "measure"
    """Folder of this measurement below <root>/<name>/. The main one is called measure."""
    drafters: tuple[str, ...] = ()
    """Names of drafters of this run, or checkpoint folders; empty: all that the run has trained, of a sweep's row the best."""
    kinds: tuple[str, ...] = ("ngram",)
    """Drafters without training that are measured beside them: recipes of conf/head/, or names of `heads`."""
    heads: dict[str, dict[str, Any]] = field(default_factory=dict)
    """What such a name means where it is not a recipe as it stands: name -> recipe (or kind) and changed keys, such as
    {exit2: {recipe: early_exit, exit_layer: 2}}."""
    draft: dict[str, Any] = field(default_factory=dict)
    """One draft for all in place of their own: shape, depth, choices, nodes, width; such as {shape: dynamic, nodes: 26}."""
    drafts: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Other drafts than a drafter was trained for: name -> shape, depth, choices, nodes, width. Such as {ngram: {depth: 8}}."""
    records: RecordsConfig = field(default_factory=RecordsConfig)
    """Write down in <measurement>/records/<drafter>/ what is drafted and where it fails, in a decoding beside the clock."""

    def __post_init__(self) -> None:
        require_folder_name("measure.name", self.name)


def run(settings: Settings) -> None:
    """Measure, print the table and where the report is; an unchanged complete measurement is only shown again."""
    from inference.report import print_table
    from inference.report_schema import read_report
    from scripts.report import console

    if not is_main_process():
        return  # one process measures: others beside it would only disturb the clock
    report = measured(settings)
    print_table(read_report(report), console())
    print(shown(report), flush=True)


def measured(settings: Settings) -> Path:
    """Measure unless that was done and nothing has changed since; returns report.json's path."""
    from inference.measure.run import REPORT_FILE, measure

    out = settings.run.directory / settings.measure.name
    found = chosen(settings.measure, settings.run)
    folder = open_folder(
        settings, out, [file for item in found for file in weight_files(item)], stage_decides=True
    )
    if folder.complete:
        print(
            f"{shown(out)} is complete; nothing has changed (run.overwrite=true measures again)", flush=True
        )
        return out / REPORT_FILE
    prepare_process(settings.run)
    from inference.target.model import TargetModel

    target = TargetModel.load(settings.target)
    arms = [arm(item, target, settings) for item in found]
    loaded = load(settings.bench)
    measure(settings.bench, target, arms, loaded.prompts, out, revision=loaded.revision, recording=settings.measure.records)
    folder.finish()
    return out / REPORT_FILE


def chosen(config: MeasureConfig, run: RunConfig) -> list[Found]:
    """The drafters to measure, trained ones first; raises `UserError` when there are none or two share a name."""
    named = [drafters.find(name, run) for name in config.drafters]
    found = [
        *(named or drafters.best_of_sweeps(drafters.trained(run))),
        *(drafters.find(kind, run, config.heads) for kind in config.kinds),
    ]
    if not found:
        raise UserError(
            f"there is nothing to measure: '{run.directory}' has no trained drafter. Train one, or set measure.drafters."
        )
    names = [item.name for item in found]
    for name in config.drafts:
        if name not in names:
            raise UserError(
                f"measure.drafts names '{name}', which is not measured. Measured: {', '.join(names)}."
            )
    return found


def weight_files(found: Found) -> list[Path]:
    """The files of a checkpoint whose change makes a measurement stale."""
    from inference.decoding.decode_file import DECODE_FILE

    if found.checkpoint is None:
        return []
    return [file for name in (CONFIG_FILE, WEIGHTS_FILE, DECODE_FILE) if (file := found.checkpoint / name).is_file()]


def arm(found: Found, target: TargetModel, settings: Settings) -> Arm:
    """One contestant: the drafter with its own draft."""
    from inference.decoding.arm import Arm

    config = settings.measure
    changes = {**config.draft, **config.drafts.get(found.name, {})}
    own = drafters.decode_settings(found, settings, target, 1, changes)
    if own.shape == "none":  # a contestant drafts
        own = drafters.draft_settings(found, settings.decode, changes)
    path = shown(found.checkpoint) if found.checkpoint else ""
    return Arm(found.name, drafters.load(found, target), own, path)


def load(bench: BenchConfig) -> Loaded:
    """The prompts to measure on, and the commit of the dataset they are from."""
    from inference.measure.datasets import load_bench_prompts

    return load_bench_prompts(bench.prompts, bench.dataset, bench.domains)


def prompts(bench: BenchConfig) -> list[Prompt]:
    """The prompts to measure on."""
    return load(bench).prompts
