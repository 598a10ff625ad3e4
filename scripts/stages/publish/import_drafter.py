"""`headstart import`: converts a drafter that others have trained to a checkpoint of this project.

headstart import import.source=<folder> run.name=theirs run.drafter=eagle3 target.path=...
headstart measure run.name=theirs target=...
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from heads.api.errors import UserError
from inference.export.importing import import_folder, read_folder
from inference.folders import require_folder_name
from inference.target.loading import TargetConfig
from inference.target.model import TargetModel
from scripts.config.schema import Settings
from scripts.run.process import prepare_process
from train.target.parts import load_parts


def run(settings: Settings) -> None:
    """Write <run>/train/<drafter>/best, or import.out."""
    config = settings.import_
    if not config.source:
        raise UserError(
            "import.source: give the folder to import, for instance one that `hf download` fetched."
        )
    source = Path(config.source)
    name = require_folder_name("run.drafter", settings.run.drafter or source.resolve().name)
    out = Path(config.out or settings.run.directory / "train" / name / "best")
    if out.exists() and not config.overwrite:
        raise UserError(
            f"'{out}' is there already. Choose run.drafter or import.out, or replace it with "
            "import.overwrite=true."
        )
    prepare_process(settings.run)
    folder = read_folder(source, config.layout)
    target = load_target(settings.target)
    found = import_folder(folder, target, out, config.layout)
    parameters = sum(value.numel() for value in found.tensors.values())
    print(f"{found.kind} of {parameters:,} parameters: {out}")
    for note in found.notes:
        print(f"note: {note}")


def load_target(config: TargetConfig) -> TargetModel:
    """The target on the CPU: its embedding and LM head, which an import compares and copies, or the
    whole target if they cannot be read apart from its other weights."""
    config = replace(config, device="cpu")
    try:
        return load_parts(config)
    except UserError:
        return TargetModel.load(config)
