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
from scripts.run.drafters import at, one_of
from scripts.run.process import is_main_process


def run(settings: Settings) -> None:
    """Write <run>/export/<drafter>/<engine>, or export.out."""
    if not is_main_process():
        return
    config = settings.export
    found = at(Path(config.checkpoint)) if config.checkpoint else one_of(settings.run)
    assert found.checkpoint is not None, "trained drafters have a checkpoint"
    if config.checkpoint and not config.out:
        raise UserError(
            "export.out is missing: name the folder to write for a checkpoint without a run."
        )
    own = settings.run.directory / "export" / found.name / config.engine
    out = Path(config.out) if config.out else own
    checkpoint = prepare(found.checkpoint, config.engine)
    facts = export(config, checkpoint, Target.of(settings.target, checkpoint.info), out)
    print(f"{facts.method} for {config.engine} ({facts.layout}): {out}")
    for note in facts.notes:
        print(f"note: {note}")
    for line in (facts.serve, facts.serve_as_custom_class):
        if line:
            print(line)
