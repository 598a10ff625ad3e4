"""`headstart generate`: the target answers the prompts of a dataset; writes <run>/generate/ with shards and a manifest."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scripts.run import open_folder, prepare_process, shown

if TYPE_CHECKING:
    from scripts.config import Settings


def run(settings: Settings) -> None:
    """Generate answers, continuing an interrupted folder; a complete one is left alone."""
    from train.generate import generate

    out = settings.run.directory / "generate"
    folder = open_folder(settings, out, stage_decides=True)
    if folder.complete:
        print(f"{shown(out)} is complete; nothing to do (run.overwrite=true starts again)", flush=True)
        return
    prepare_process(settings.run)
    generate(
        settings.generate, settings.data, settings.sampling, settings.target, out, provenance=folder.session
    )
    folder.finish()
