"""`headstart import`: a drafter that somebody else trained, as a checkpoint of ours.

headstart import import.source=<folder> run.name=theirs run.drafter=eagle3 target=... target.path=...
headstart measure run.name=theirs target=...
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from heads.api.errors import UserError
from inference.folders import require_folder_name
from scripts.run import is_main_process

if TYPE_CHECKING:
    from inference.export.importing import ImportConfig
    from scripts.config import Settings


def run(settings: Settings) -> None:
    """Write <run>/train/<drafter>/best, or import.out."""
    from inference.export.importing import import_folder, summary
    from inference.export.layouts.folder import Folder
    from inference.target.model import TargetModel

    if not is_main_process():
        return
    config: ImportConfig = getattr(settings, "import")
    if not config.source:
        raise UserError(
            "import.source: give the folder to import, for instance one that `hf download` fetched."
        )
    source = Path(config.source)
    name = require_folder_name("run.drafter", settings.run.drafter or source.resolve().name)
    out = Path(config.out) if config.out else settings.run.directory / "train" / name / "best"
    if out.exists() and not config.overwrite:
        raise UserError(
            f"'{out}' is there already. Choose run.drafter or import.out, or replace it with import.overwrite=true."
        )
    folder = Folder.read(source)
    facts = summary(import_folder(folder, TargetModel.load(settings.target), out, config.layout))
    print(f"{facts['kind']} of {facts['parameters']:,} parameters: {out}")
    for note in facts["notes"]:
        print(f"note: {note}")
