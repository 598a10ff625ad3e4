"""Writes only an adapter's updates, in the layout of the library peft, with notes that name the
base.

No serving engine loads adapters of drafters, so the folder is for peft and for future engines.
`write_layout` in `engine_folder` writes the merged drafter.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import torch

from heads.api.checkpoint import build_config, read_config, stored_weights, weights_file
from heads.api.registry import get_kind
from inference.export.config import ExportConfig
from inference.export.engine_folder import STAGE, refuse_existing, write_text
from inference.export.layouts.folder import ExportNotes
from inference.folders import EXPORT_FILE, replace_folder
from inference.integrity import require_unchanged
from inference.manifest import file_sha256

LAYOUT, LIBRARY = "adapter", "peft"
NAMES = (
    "its layers are named as the modules of the base drafter; of a language model as transformers "
    "names them, so that peft loads it onto the folder that an export of the base wrote"
)


def export_adapter(config: ExportConfig, folder: Path, out: Path) -> ExportNotes:
    """Write the updates of the adapter in `folder` to `out` and return the notes. Raises
    `UserError`, before anything is written, for an adapter that cannot be exported, also where its
    base is missing or has changed. See `engine_folder.export` for config.overwrite."""
    require_unchanged(folder)
    content, stored = read_config(folder), stored_weights(folder)
    assert stored.updates is not None and stored.base is not None, "the caller has an adapter"
    kind, updates = get_kind(content["kind"]), stored.updates
    refuse_existing(config, out)
    if config.dtype:
        dtype = getattr(torch, config.dtype)
        layers = {name: (a.to(dtype), b.to(dtype)) for name, (a, b) in updates.layers.items()}
        updates = replace(updates, layers=layers)
    base = str(stored.path.parent.resolve())
    merged = f"export.merge=true writes the merged drafter for {config.engine}"
    notes = ExportNotes(
        kind=kind.name,
        method=kind.export_method(build_config(kind.name, content["config"])),
        engine=LIBRARY,
        layout=LAYOUT,
        source={
            "checkpoint": str(folder.resolve()),
            "sha256": file_sha256(weights_file(folder)),
            "base": base,
            "base_sha256": stored.base.sha256,
        },
        config=content["config"],
        taps=list(content["needs"].get("taps", ())),
        target=content["target"],
        notes=[f"no engine takes adapters of drafters: {merged}", NAMES],
    )
    setting = "export.overwrite" if config.overwrite else "export.out"
    with replace_folder(out, STAGE, setting) as fresh:
        updates.write(fresh, base, stored.base.sha256)
        notes.files = {path.name: file_sha256(path) for path in sorted(fresh.iterdir())}
        write_text(fresh / EXPORT_FILE, asdict(notes))
    return notes
