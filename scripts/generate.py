"""`headstart generate`: the target answers the prompts of a dataset; writes <run>/generate/ with shards and a manifest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from scripts.run import open_folder, prepare_process, shown
from scripts.stages import STAGES

if TYPE_CHECKING:
    from scripts.config import Settings
    from train.data.config import DataConfig, HeldOut


def run(settings: Settings) -> None:
    """Generate answers, continuing an interrupted folder; a complete one is left alone."""
    from train.generate.run import generate

    out = settings.run.directory / "generate"
    folder = open_folder(settings, out, stage_decides=True)
    if folder.complete:
        print(f"{shown(out)} is complete; nothing to do (run.overwrite=true starts again)", flush=True)
        return
    prepare_process(settings.run)
    data = with_benches(settings.data)
    generate(settings.generate, data, settings.sampling, settings.target, out, provenance=folder.session)
    folder.finish()


def with_benches(data: DataConfig) -> DataConfig:
    """The configuration with the prompts of `data.benches` held out; raises `UserError` for a bench that does not exist."""
    if data.decontaminate == "none":
        return data
    return replace(data, held_out_prompts=(*data.held_out_prompts, *held_out_prompts(data.benches)))


def held_out_prompts(benches: Sequence[str]) -> list[HeldOut]:
    """What the named files of conf/bench/ measure on."""
    from scripts.config import load_settings
    from train.data.config import HeldOut

    found = []
    for name in benches:
        bench = load_settings(STAGES["measure"], [f"bench={name}"]).bench
        found.append(HeldOut(str(bench.prompts), bench.dataset, tuple(bench.domains)))
    return found
