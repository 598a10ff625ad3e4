"""`draft.json` in a checkpoint: the draft that it was trained for.

A training stage records its settings beside its checkpoints. A checkpoint that stands alone, such
as a drafter that a learner has accepted, has this file instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from heads.api.reading import read_object
from inference.manifest import write_json

DRAFT_FILE = "draft.json"
DRAFT_KEYS = ("shape", "depth", "choices", "nodes", "width", "candidates", "depth_penalty")
"""The decode settings that belong to a drafter (its draft) and not to the measurement."""


def write_draft(checkpoint: Path, decode: Mapping[str, Any]) -> None:
    """Write the draft among the settings `decode`, given by name."""
    write_json(checkpoint / DRAFT_FILE, {key: decode[key] for key in DRAFT_KEYS})


def read_draft(checkpoint: Path) -> dict[str, Any]:
    """The settings of the draft by name; empty if the checkpoint has no such file. Raises
    `UserError` for a damaged one."""
    path = checkpoint / DRAFT_FILE
    if not path.is_file():
        return {}
    found = read_object(path, "Delete it to draft as `decode` says.")
    return {key: found[key] for key in DRAFT_KEYS if key in found}
