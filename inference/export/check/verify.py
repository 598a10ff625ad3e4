"""`headstart verify-export`: an exported folder checked as its engine would read it, without it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from heads.api.checkpoint import CONFIG_FILE, WEIGHTS_FILE
from heads.api.errors import UserError
from inference.export.check.config import VerifyConfig
from inference.export.check.static import check_files
from inference.export.importing import recognise
from inference.export.layouts import base, dflash, eagle3
from inference.export.layouts.folder import Folder, Json
from inference.export.layouts.registry import LAYOUTS
from inference.manifest import file_sha256
from inference.target.loading import TargetConfig
from inference.target.model import TargetModel

WRAPPED = "speculators-"
"""Prefix of the layouts of the library speculators, which wrap those of engines."""


@dataclass
class Verdict:
    """The check of a folder. layout: its name; faults: each begins with a name (see `static`)."""

    layout: str
    engine: str
    faults: list[str]
    notes: list[str]


def verify(config: VerifyConfig, given: TargetConfig, target: TargetModel | None = None) -> Verdict:
    """Check the folder of `config` against a target. target: that of `given`, if it is loaded.

    Raises `UserError` for a folder that is not a drafter's.
    """
    folder = Folder.read(Path(config.dir))
    target = TargetModel.load(given) if target is None else target
    name = folder.export.layout or find_layout(folder)
    layout = LAYOUTS.get(name.removeprefix(WRAPPED))
    if layout is None:
        raise UserError(f"'{folder.path}' is of an unknown layout '{name}': export it again.")
    source, why = find_source(folder, config.source)
    notes = [] if source else [f"not compared with a checkpoint: {why}"]
    faults = check_files(folder, layout, target.info, find_rope(folder, layout, source, given))
    return Verdict(name, folder.export.engine, faults, notes + folder.export.notes)


def find_layout(folder: Folder) -> str:
    """The layout of a folder without our notes; raises `UserError` if it is none that we read."""
    name = recognise(folder)
    if name == "speculators":
        return f"{WRAPPED}{folder.config['speculators_model_type']}"
    if name == "eagle3" and eagle3.MASK in folder.tensors:
        return "peagle"
    if name == "dflash":
        marks = (found for tensor, found in dflash.MARKS.items() if tensor in folder.tensors)
        return next(marks, name)
    return "mtp-mimo" if name == "mtp" else name


def find_rope(
    folder: Folder, layout: base.Layout, source: Path | None, given: TargetConfig
) -> Json:
    """The rotary parameters that the folder must have, by its checkpoint or its notes.

    Empty if they are unknown.
    """
    if source is not None and layout.rope is not None:
        try:
            return layout.rope(base.read_checkpoint(source), base.Target(given))
        except UserError:
            return {}
    theta = folder.export.target.get("rope_theta")
    return base.plain_rope(theta) if theta and layout.rope is base.own_rope else {}


def find_source(folder: Folder, given: str) -> tuple[Path | None, str]:
    """The checkpoint that a folder was made of, and, if it is None, the reason.

    given: a checkpoint folder to take instead of the one in the notes. Raises `UserError` if that
    is none.
    """
    source = folder.export.source
    path = Path(given) if given else folder.path / source.get("checkpoint", "")
    if not given and not source:
        return None, "the folder does not say which checkpoint it was made of"
    if not (path / CONFIG_FILE).is_file() or not (path / WEIGHTS_FILE).is_file():
        if given:
            raise UserError(f"verify.source: '{path}' is not a drafter checkpoint.")
        return None, f"the checkpoint '{path}' does not exist any more"
    if source.get("sha256") and file_sha256(path / WEIGHTS_FILE) != source["sha256"]:
        return None, f"the weights of '{path}' have changed since the export"
    return path, ""
