"""`headstart export`: a trained drafter as a folder that a serving engine loads.

headstart export run.name=demo run.drafter=eagle3 export.engine=vllm
headstart export export.checkpoint=<folder> export.out=<folder> export.engine=sglang target=...
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from heads.api.errors import UserError, suggest
from scripts.drafters import Found, at, trained
from scripts.run import RunConfig, is_main_process

if TYPE_CHECKING:
    from scripts.config import Settings


def run(settings: Settings) -> None:
    """Write <run>/export/<drafter>/<engine>, or export.out."""
    from inference.export.engine_folder import export, prepare
    from inference.export.layouts.base import Target

    if not is_main_process():
        return
    config = settings.export
    found = at(Path(config.checkpoint)) if config.checkpoint else one_of(settings.run)
    assert found.checkpoint is not None, "trained drafters have a checkpoint"
    if config.checkpoint and not config.out:
        raise UserError("export.out: say where the folder of a checkpoint without a run is to be written.")
    out = Path(config.out) if config.out else settings.run.directory / "export" / found.name / config.engine
    checkpoint = prepare(found.checkpoint, config.engine)
    facts = export(config, checkpoint, Target.of(settings.target, checkpoint.info), out)
    print(f"{facts.method} for {config.engine} ({facts.layout}): {out}")
    for note in facts.notes:
        print(f"note: {note}")
    for line in (facts.serve, facts.serve_as_custom_class):
        if line:
            print(line)


def one_of(run: RunConfig) -> Found:
    """The drafter named by run.drafter, or the only one of the run; raises `UserError` when that is not clear."""
    known = trained(run)
    if run.drafter in known:
        return known[run.drafter]
    if not run.drafter and len(known) == 1:
        return next(iter(known.values()))
    if not known:
        raise UserError(
            f"'{run.directory}' holds no trained drafter. Train one first, or give export.checkpoint=<folder>."
        )
    if not run.drafter:
        raise UserError(f"'{run.directory}' has trained several drafters. Say which with run.drafter=<name>: {', '.join(known)}.")
    raise UserError(f"run.drafter: '{run.directory}' has trained no '{run.drafter}'.{suggest(run.drafter, known)}")
