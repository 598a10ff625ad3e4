"""Drafters of other trainers as checkpoints of ours, recognised by their tensors.

A folder is read completely or refused. The result is an ordinary checkpoint: it can be measured,
audited, exported, and trained further (train.refresh.init_from). A folder of our own export gives
back the checkpoint it was made of.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from heads.api.checkpoint import WEIGHTS_FILE, build_config, load_weights, save_drafter
from heads.api.drafter import TrainableDrafter
from heads.api.errors import UserError
from heads.api.registry import Kind, get_kind, kind_names
from inference.decoding.decode_file import DECODE_FILE
from inference.export.layouts import causal, dflash, eagle, eagle3, medusa, mtp, speculators
from inference.export.layouts.base import Imported, Json
from inference.export.layouts.folder import Folder, Receiver
from inference.folders import replaced
from inference.manifest import file_entry, write_manifest
from inference.staleness.reference import WATCH_FILE
from inference.target.model import TargetModel

STAGE = "import"
LATER_FILES = (DECODE_FILE, WATCH_FILE)
"""Files of other stages next to a checkpoint about these very weights; they go with them."""


@dataclass(frozen=True)
class Reader:
    """How a layout is recognised and read."""

    matches: Callable[[Folder], bool]
    read: Callable[[Folder, Receiver], Imported]


READERS = {
    "speculators": Reader(speculators.matches, speculators.read),
    "mtp": Reader(mtp.matches, mtp.read),
    "eagle3": Reader(eagle3.matches, eagle3.read),
    "dflash": Reader(dflash.matches, dflash.read),
    "eagle": Reader(eagle.matches, eagle.read),
    "medusa": Reader(medusa.matches, medusa.read),
    "causal": Reader(causal.matches, causal.read),
}
"""In the order in which they are tried; the names are `inference.export.config.READABLE`."""


def import_folder(folder: Folder, target: TargetModel, out: Path, layout: str = "auto") -> Imported:
    """Write the checkpoint `out` from a folder, for `target`, replacing an earlier import.

    Raises `UserError`, before anything is written, for a folder that fits none of our kinds, and
    for an `out` that was not imported.
    """
    name = layout if layout != "auto" else recognise(folder)
    receiver = Receiver(target.info, target.weights)
    found = READERS[name].read(folder, receiver)
    kind, values = own_kind(folder, found)
    found.kind = kind.name
    drafter = kind.drafter_class(build_config(kind.name, values), target.info)
    assert isinstance(drafter, TrainableDrafter), "layouts are of kinds with weights"
    tensors = fit(found, drafter, folder, receiver)
    floats = {value.dtype for value in tensors.values() if value.is_floating_point()}
    if len(floats) == 1:
        drafter.to(floats.pop())
    with replaced(out, STAGE, "import.overwrite", beside=LATER_FILES) as fresh:
        save_drafter(drafter, fresh, target.info, tensors)
        load_weights(drafter, fresh / WEIGHTS_FILE)  # finite, complete, and readable
        files = [file_entry(fresh, path.name) for path in sorted(fresh.iterdir())]
        source = str(folder.path.resolve())
        write_manifest(fresh, STAGE, {"kind": found.kind, "source": source, "files": files})
    return found


def own_kind(folder: Folder, found: Imported) -> tuple[Kind, Json]:
    """The kind and configuration: those in our notes if they are of the method that was read.

    The notes restore what the layout has no place for, and kinds that are laid out as another one.
    """
    kind, notes = get_kind(found.kind), folder.export
    if notes.config and notes.kind in kind_names():
        own = get_kind(notes.kind)
        method = own.export_method(build_config(own.name, notes.config))
        if method == kind.export_method(build_config(kind.name, found.config)):
            return own, notes.config
    return kind, found.config


def recognise(folder: Folder) -> str:
    """The layout of a folder; raises `UserError` if it is none that can be read."""
    for name, reader in READERS.items():
        if reader.matches(folder):
            return name
    raise UserError(
        f"'{folder.path}' is of no layout that we read ({', '.join(READERS)}): its class is "
        f"'{folder.architecture}' and its tensors begin with {sorted(folder.tensors)[:4]}."
    )


def fit(
    found: Imported, drafter: TrainableDrafter, folder: Folder, receiver: Receiver
) -> dict[str, Tensor]:
    """The tensors under our names, checked by name and shape.

    Copies of the target's are left out.
    """
    wanted = drafter.state_dict()
    tensors = dict(found.tensors)
    for name in sorted(set(tensors) - set(wanted)):
        if not receiver.is_shared(name.removeprefix("model."), tensors[name]):
            raise UserError(
                f"'{folder.path}': '{name}' has no place in a drafter of kind '{found.kind}'."
            )
        del tensors[name]
    missing = sorted(set(wanted) - set(tensors))
    if missing:
        raise UserError(f"'{folder.path}' lacks {missing[:6]} of a drafter of kind '{found.kind}'.")
    for name, value in tensors.items():
        if value.shape != wanted[name].shape:
            raise UserError(
                f"'{folder.path}': '{name}' has shape {list(value.shape)}, a drafter of kind "
                f"'{found.kind}' needs {list(wanted[name].shape)}."
            )
        if value.is_floating_point() and not bool(torch.isfinite(value).all()):
            raise UserError(f"'{folder.path}': '{name}' holds values that are not finite.")
    return tensors
