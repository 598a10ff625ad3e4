"""Whether a checkpoint's files are what the stage that wrote it has listed.

Its own manifest (of an import, or of a published drafter) or that of the training around it lists
its configuration and weights with their SHA-256. A checkpoint that lies alone, or whose training is
not complete or of an earlier version, is not listed anywhere.
"""

from __future__ import annotations

import json
from pathlib import Path

from heads.api.checkpoint import CONFIG_FILE, WEIGHTS_FILE
from inference.manifest import MANIFEST_FILE, read_manifest, verify_file

CHECKED = (CONFIG_FILE, WEIGHTS_FILE)
"""Later stages put others beside them, about these very weights."""
STAGES = ("import", "push")
"""Stages whose manifest lies in the checkpoint itself."""


def require_unchanged(checkpoint: Path) -> None:
    """Raise `UserError`, which names the file, for a checkpoint that was changed or damaged since
    it was written."""
    whole = checkpoint.resolve()
    for folder, stages in ((whole, STAGES), (whole.parent, ("train",))):
        stage = _stage(folder)
        if stage not in stages:
            continue
        for entry in read_manifest(folder, stage).get("files") or ():
            path = folder / str(entry.get("file", ""))
            if path.parent == whole and path.name in CHECKED:
                verify_file(folder, entry)
        return


def _stage(folder: Path) -> str:
    """The stage that a folder's manifest names; empty without one of ours."""
    try:
        content = json.loads((folder / MANIFEST_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return ""
    return str(content.get("stage", "")) if isinstance(content, dict) else ""
