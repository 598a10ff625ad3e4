"""Drafters that others trained, as checkpoints of ours: found out by their tensors, read by their layout, complete or refused.

What comes out is an ordinary checkpoint: it can be measured, audited, exported, and trained further (train.refresh.init_from). A
folder of our own export gives back the very checkpoint it was made of.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from heads.api.checkpoint import WEIGHTS_FILE, build_config, load_weights, save_drafter
from heads.api.drafter import TrainableDrafter
from heads.api.errors import UserError, suggest
from heads.api.registry import get_kind
from inference.decoding.decode_file import DECODE_FILE
from inference.export.layouts import causal, dflash_reading, eagle, eagle3, medusa, mtp, speculators
from inference.export.layouts.base import Imported
from inference.export.layouts.folder import Folder, Receiver
from inference.folders import replaced
from inference.manifest import file_entry, write_manifest
from inference.staleness.reference import WATCH_FILE
from inference.target.model import TargetModel

STAGE = "import"
LATER_FILES = (DECODE_FILE, WATCH_FILE)
"""What other stages put next to a checkpoint about these very weights; it goes with them."""
READERS: dict[str, tuple[Callable[[Folder], bool], Callable[[Folder, Receiver], Imported]]] = {
    "speculators": (speculators.matches, speculators.read),
    "mtp": (mtp.matches, mtp.read),
    "eagle3": (eagle3.matches, eagle3.read),
    "dflash": (dflash_reading.matches, dflash_reading.read),
    "eagle": (eagle.matches, eagle.read),
    "medusa": (medusa.matches, medusa.read),
    "causal": (causal.matches, causal.read),
}
"""Layout -> whether a folder is of it, and its reader, in the order in which they are tried."""


@dataclass(frozen=True)
class ImportConfig:
    """Which folder is imported, and where to."""

    source: str = ""
    """The folder that somebody else's trainer, or our own export, wrote."""
    layout: str = "auto"
    """auto, speculators, mtp, eagle3 (P-EAGLE too), dflash (and DFlash 2, DSpark, Domino), eagle, medusa or causal (language
    models).
    """
    out: str = ""
    """The checkpoint folder to write; empty: <run>/train/<run.drafter, or the source's name>/best, where measuring finds it."""
    overwrite: bool = False
    """Replace the checkpoint when it is there and was imported."""

    def __post_init__(self) -> None:
        if self.layout != "auto" and self.layout not in READERS:
            raise UserError(
                f"import.layout '{self.layout}' is unknown.{suggest(self.layout, ['auto', *READERS])}"
            )


def import_folder(folder: Folder, target: TargetModel, out: Path, layout: str = "auto") -> Imported:
    """Write `out` from a folder, for `target`, replacing an earlier import.

    Raises `UserError`, before anything is written, for a folder of no layout that we read, and for an `out` that was
    not imported.
    """
    name = layout if layout != "auto" else recognise(folder)
    found = READERS[name][1](folder, Receiver(target.info, target.weights))
    kind = get_kind(found.kind)
    values = found.config
    own = folder.export
    if own.get("kind") == found.kind and isinstance(own.get("config"), dict):
        values = own["config"]
    drafter = kind.drafter_class(build_config(found.kind, values), target.info)
    assert isinstance(drafter, TrainableDrafter), "layouts are of kinds with weights"
    tensors = fitting(found, drafter, folder, Receiver(target.info, target.weights))
    floats = {value.dtype for value in tensors.values() if value.is_floating_point()}
    if len(floats) == 1:
        drafter.to(floats.pop())
    with replaced(out, STAGE, "import.overwrite", beside=LATER_FILES) as fresh:
        save_drafter(drafter, fresh, target.info, tensors)
        load_weights(drafter, fresh / WEIGHTS_FILE)  # finite, complete, and readable
        files = [file_entry(fresh, path.name) for path in sorted(fresh.iterdir())]
        write_manifest(fresh, STAGE, {"kind": found.kind, "source": str(folder.path.resolve()), "files": files})
    return found


def recognise(folder: Folder) -> str:
    """The layout of a folder; raises `UserError` when it is none that we read."""
    for name, (matches, _) in READERS.items():
        if matches(folder):
            return name
    raise UserError(
        f"'{folder.path}' is of no layout that we read ({', '.join(READERS)}): its class is '{folder.architecture}' "
        f"and its tensors begin with {sorted(folder.tensors)[:4]}."
    )


def fitting(
    found: Imported, drafter: TrainableDrafter, folder: Folder, receiver: Receiver
) -> dict[str, Tensor]:
    """The tensors under our names, without those that this configuration shares with the target; checked by name and shape."""
    wanted = drafter.state_dict()
    tensors = dict(found.tensors)
    for name in sorted(set(tensors) - set(wanted)):
        short = name.removeprefix("model.")
        if not receiver.is_shared(short, tensors[name]):
            raise UserError(f"'{folder.path}': '{name}' has no place in a drafter of kind '{found.kind}'.")
        del tensors[name]
    missing = sorted(set(wanted) - set(tensors))
    if missing:
        raise UserError(f"'{folder.path}' lacks {missing[:6]} of a drafter of kind '{found.kind}'.")
    for name, value in tensors.items():
        if value.shape != wanted[name].shape:
            raise UserError(
                f"'{folder.path}': '{name}' has shape {list(value.shape)}, a drafter of kind '{found.kind}' needs "
                f"{list(wanted[name].shape)}."
            )
        if value.is_floating_point() and not bool(torch.isfinite(value).all()):
            raise UserError(f"'{folder.path}': '{name}' holds values that are not finite.")
    return tensors


def summary(found: Imported) -> dict[str, Any]:
    """What was imported, in a few words for the terminal."""
    count = sum(value.numel() for value in found.tensors.values())
    return {"kind": found.kind, "parameters": count, "notes": found.notes}
