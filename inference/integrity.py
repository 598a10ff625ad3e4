"""Whether a checkpoint's files are what the stage that wrote it has listed.

Its own manifest (of an import, or of a published drafter) or that of the training around it lists
its configuration and weights with their SHA-256. A checkpoint that lies alone, or whose training is
not complete or of an earlier version, is not listed anywhere.
"""

from __future__ import annotations

import os
from pathlib import Path

from heads.api.adapter import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from heads.api.checkpoint import CONFIG_FILE, WEIGHTS_FILE
from heads.api.reading import read_object
from inference.manifest import LARGEST, MANIFEST_FILE, listed_files, verify_file

CHECKED = (CONFIG_FILE, WEIGHTS_FILE, ADAPTER_CONFIG, ADAPTER_WEIGHTS)
"""Later stages put others beside them, about these very weights."""
STAGES = ("import", "push")
"""Stages whose manifest lies in the checkpoint itself."""


def require_unchanged(checkpoint: Path) -> None:
    """Raise `UserError`, which names the file, for a checkpoint that was changed or damaged since
    it was written, and a manifest that is not readable, by which nothing can be checked.

    Where a link stands in the place of a training's checkpoint, what it leads to must be what the
    training has listed; else what the folder behind it has.
    """
    given = Path(os.path.abspath(checkpoint))  # noqa: PTH100 - not through links
    behind = checkpoint.resolve()
    wholes = tuple(dict.fromkeys((given, behind)))
    places: list[tuple[Path, tuple[str, ...]]] = [(whole, STAGES) for whole in wholes]
    places += [(whole.parent, ("train",)) for whole in wholes]
    for folder, stages in places:
        path = folder / MANIFEST_FILE
        content = read_object(path, most=LARGEST) if path.exists() else {}
        stage = str(content.get("stage"))
        if stage not in stages:
            continue
        # an earlier version lists none
        for entry in listed_files(folder, stage) if content.get("files") is not None else ():
            file = folder / entry["file"]
            if file.parent in (given, behind) and file.name in CHECKED:
                verify_file(folder, entry)
        return
