"""`headstart generate`: the target answers the prompts of a dataset.

Writes <run>/generate/ with shards and a manifest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from scripts.config.schema import Settings, load_settings
from scripts.config.stages import STAGES
from scripts.run.folder import open_folder
from scripts.run.process import prepare_process, shown
from train.data.config import DataConfig, HeldOut
from train.generate.run import generate


def run(settings: Settings) -> None:
    """Generate answers, continuing an interrupted folder; a complete one is left alone."""
    out = settings.run.directory / "generate"
    folder = open_folder(settings, out, stage_decides=True)
    if folder.complete:
        print(
            f"{shown(out)} is complete; nothing to do (run.overwrite=true starts again)", flush=True
        )
        return
    prepare_process(settings.run)
    data = with_benches(settings.data)
    generate(
        settings.generate, data, settings.sampling, settings.target, out, provenance=folder.session
    )
    folder.finish()


def with_benches(data: DataConfig) -> DataConfig:
    """`data` with the prompts of `data.benches` held out; raises `UserError` for unknown ones."""
    if data.decontaminate == "none":
        return data
    return replace(data, held_out_prompts=(*data.held_out_prompts, *held_out_prompts(data.benches)))


def held_out_prompts(benches: Sequence[str]) -> list[HeldOut]:
    """The prompts that the named files of conf/bench/ measure on."""
    found = []
    for name in benches:
        bench = load_settings(STAGES["measure"], [f"bench={name}"]).bench
        found.append(HeldOut(str(bench.prompts), bench.dataset, tuple(bench.domains)))
    return found
