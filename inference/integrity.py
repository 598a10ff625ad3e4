"""Checks whether a checkpoint's files are those that the stage that wrote it has listed.

The checkpoint's own manifest (of an import, or of a published drafter) or the manifest of the
training around it lists its configuration and weights with their SHA-256. There is no list for a
checkpoint outside a training's folder, or one whose training is unfinished or of an earlier
version.
"""

from __future__ import annotations

import os
from pathlib import Path

from heads.api.adapter import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from heads.api.checkpoint import CONFIG_FILE, WEIGHTS_FILE
from heads.api.reading import read_object
from inference.manifest import LARGEST, MANIFEST_FILE, listed_files, verify_file

CHECKED = (CONFIG_FILE, WEIGHTS_FILE, ADAPTER_CONFIG, ADAPTER_WEIGHTS)
"""Later stages put other files beside them, about exactly these weights."""
STAGES = ("import", "push")
"""Stages whose manifest lies in the checkpoint's folder."""


def require_unchanged(checkpoint: Path) -> None:
    """Raise `UserError`, which names the file, for a checkpoint that was changed or damaged since
    it was written, and for a manifest that is not readable.

    If a link stands in place of a training's checkpoint, the files behind it must be those that the
    training has listed; otherwise those that the manifest behind the link lists.
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
