"""`headstart generate`: the target answers the prompts of a dataset.

Writes <run>/generate/ with shards and a manifest.
"""

from __future__ import annotations

from dataclasses import replace

from scripts.config.schema import Settings, load_settings
from scripts.config.stages import STAGES
from scripts.run.folder import open_folder
from scripts.run.process import prepare_process
from train.data.config import DataConfig, HeldOut
from train.generate.run import generate


def run(settings: Settings) -> None:
    """Generate answers, continuing an interrupted folder; a complete one is left alone."""
    folder = open_folder(settings, settings.run.directory / "generate", stage_decides=True)
    if folder.skip():
        return
    prepare_process(settings.run)
    generate(
        settings.generate,
        with_benches(settings.data),
        settings.sampling,
        settings.target,
        folder.path,
        provenance=folder.session,
    )
    folder.finish()


def with_benches(data: DataConfig) -> DataConfig:
    """`data` with the prompts of `data.benches` held out: those that the named files of conf/bench/
    measure on. Raises `UserError` for unknown ones."""
    if data.decontaminate == "none":
        return data
    benches = [load_settings(STAGES["measure"], [f"bench={name}"]).bench for name in data.benches]
    found = [HeldOut(str(one.prompts), one.dataset, tuple(one.domains)) for one in benches]
    return replace(data, held_out_prompts=(*data.held_out_prompts, *found))
