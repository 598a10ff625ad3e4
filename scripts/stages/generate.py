"""`headstart generate`: lets the target answer the prompts of a dataset.

Writes <run>/generate/ with shards and a manifest.
"""

from __future__ import annotations

from dataclasses import replace

from inference.measure.config import BenchConfig
from scripts.config.schema import Settings, load_settings
from scripts.config.stages import STAGES
from scripts.run.folder import open_folder
from scripts.run.process import prepare_process
from scripts.run.prompts import prompt_files
from train.data.config import DataConfig, HeldOut
from train.generate.run import generate

OWN = "own"
"""The bench that holds its prompts out of the data."""


def run(settings: Settings) -> None:
    """Generate answers, continuing an interrupted folder; a complete one is left unchanged."""
    out = settings.run.directory / "generate"
    files = prompt_files(*(source.path for source in settings.data.sources))
    folder = open_folder(settings, out, files, stage_decides=True, may_refuse=True)
    if folder.skip():
        return
    prepare_process(settings.run)
    generate(
        settings.generate,
        data_of(settings),
        settings.sampling,
        settings.target,
        folder.path,
        provenance=folder.session,
        accepted=folder.write,
    )
    folder.finish()


def data_of(settings: Settings) -> DataConfig:
    """`data` with everything that is held out of it: prompts for validation, unless train.prompts
    names some; prompts for measuring, with bench=own; and the prompts of `data.benches`, on which
    the named files of conf/bench/ measure. Raises `UserError` for unknown names."""
    data, bench = settings.data, settings.choices.get("bench")
    reserve = replace(
        data.reserve,
        validation=0 if data.held_out else data.reserve.validation,
        bench=data.reserve.bench if bench == OWN else 0,
    )
    data = replace(data, reserve=reserve)
    if data.decontaminate == "none":
        return data
    benches = [load_settings(STAGES["measure"], [f"bench={name}"]).bench for name in data.benches]
    found = [held_out_of(one) for one in benches]
    more = [one for one in data.held_out_prompts if one not in found]
    return replace(data, held_out_prompts=(*more, *found))


def held_out_of(bench: BenchConfig) -> HeldOut:
    """The prompts of a benchmark, as `data` holds them out."""
    return HeldOut(str(bench.prompts), bench.dataset, tuple(bench.domains))
