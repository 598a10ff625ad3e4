"""`headstart export`: a trained drafter as a folder that a serving engine loads.

headstart export run.name=demo run.drafter=eagle3 export.engine=vllm
headstart export export.checkpoint=<folder> export.out=<folder> export.engine=sglang target=...
"""

from __future__ import annotations

from pathlib import Path

from heads.api.errors import UserError
from inference.export.engine_folder import export, prepare
from inference.export.layouts.base import Target
from scripts.config.schema import Settings
from scripts.run.drafters import at, choose
from scripts.run.process import prepare_process


def run(settings: Settings) -> None:
    """Write <run>/export/<drafter>/<engine>, or export.out."""
    prepare_process(settings.run)
    config = settings.export
    given, run = config.checkpoint, settings.run
    found = at(Path(given)) if given else choose(run, several=False)[0]
    if given and not config.out:
        raise UserError(
            "export.out is missing: name the folder to write for a checkpoint without a run."
        )
    out = Path(config.out or run.directory / "export" / found.name / config.engine)
    checkpoint = prepare(found.folder, config.engine)
    facts = export(config, checkpoint, Target.of(settings.target, checkpoint.info), out)
    print(f"{facts.method} for {config.engine} ({facts.layout}): {out}")
    notes = [f"note: {note}" for note in facts.notes]
    for line in filter(None, (*notes, facts.serve, facts.serve_as_custom_class)):
        print(line)
