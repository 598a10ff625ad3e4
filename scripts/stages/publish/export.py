"""`headstart export`: writes a trained drafter as a folder that a serving engine loads.

headstart export run.name=demo run.drafter=eagle3 export.engine=vllm
headstart export export.checkpoint=<folder> export.out=<folder> export.engine=sglang target=...

For an adapter it writes only the updates or, with export.merge=true, the base with the updates
merged into it.
"""

from __future__ import annotations

from pathlib import Path

from heads.api.checkpoint import ADAPTER_KEY, read_config
from heads.api.errors import UserError
from inference.export.adapter_folder import LAYOUT, export_adapter
from inference.export.engine_folder import export, prepare
from inference.export.layouts.base import Target
from scripts.config.schema import Settings
from scripts.run.drafters import at, choose
from scripts.run.process import prepare_process


def run(settings: Settings) -> None:
    """Write <run>/export/<drafter>/<engine> (for only an adapter: /adapter), or export.out."""
    prepare_process(settings.run)
    config = settings.export
    given, run = config.checkpoint, settings.run
    found = at(Path(given)) if given else choose(run, several=False)[0]
    if given and not config.out:
        raise UserError(
            "export.out is missing: name the folder to write for a checkpoint without a run."
        )
    alone = ADAPTER_KEY in read_config(found.folder) and not config.merge
    name = LAYOUT if alone else config.engine
    out = Path(config.out or run.directory / "export" / found.name / name)
    if alone:
        facts = export_adapter(config, found.folder, out)
        print(f"{facts.method}, an adapter for {facts.engine}: {out}")
        print(*(f"note: {note}" for note in facts.notes), sep="\n")
        return
    checkpoint = prepare(found.folder, config.engine)
    facts = export(config, checkpoint, Target.of(settings.target, checkpoint.info), out)
    print(f"{facts.method} for {config.engine} ({facts.layout}): {out}")
    notes = [f"note: {note}" for note in facts.notes]
    for line in filter(None, (*notes, facts.serve, facts.serve_as_custom_class)):
        print(line)
