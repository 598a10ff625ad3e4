"""Imports drafters of other trainers as checkpoints, and recognises them by their tensors.

A folder is read completely or refused. The result is an ordinary checkpoint: it can be measured,
audited, exported, and trained further (train.refresh.init_from). Importing a folder that `headstart
export` wrote restores the checkpoint that it was made from.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from heads.api.checkpoint import build_config, load_weights, save_drafter, stored_weights
from heads.api.drafter import TrainableDrafter
from heads.api.errors import UserError
from heads.api.kinds import kind_names
from heads.api.registry import Kind, get_kind
from inference.decoding.decode_file import DECODE_FILE
from inference.export.config import READABLE
from inference.export.layouts import (
    adapter,
    causal,
    dflash,
    eagle,
    eagle3,
    medusa,
    mtp,
    native,
    speculators,
)
from inference.export.layouts.base import Imported
from inference.export.layouts.folder import CONFIG, Folder, Json, Receiver, read_json
from inference.export.quantised import open_weights
from inference.folders import replace_folder
from inference.manifest import file_entry, verify_file, write_manifest
from inference.staleness.reference import WATCH_FILE
from inference.target.model import TargetModel

STAGE = "import"
LATER_FILES = (DECODE_FILE, WATCH_FILE)
"""Files that other stages write next to a checkpoint, about exactly these weights. An import that
replaces the checkpoint deletes them too."""
MODULES = (speculators, native, mtp, eagle3, dflash, eagle, medusa, adapter, causal)
READERS = dict(zip(READABLE, MODULES, strict=True))
"""Each module's `matches` recognises a folder, and its `read` reads it. They are tried in this
order."""


def read_folder(path: Path, layout: str = "auto") -> Folder:
    """`Folder.read`; of a target's own folder, only its MTP block, if it has one."""
    if layout in ("auto", native.KIND) and (path / CONFIG).is_file():
        config = read_json(path / CONFIG)
        if native.form_of(config) is not None:
            folder = Folder.read(path, partial(native.is_of_block, config=config))
            if folder.tensors or layout == native.KIND:
                return folder
    return Folder.read(path)


def import_folder(folder: Folder, target: TargetModel, out: Path, layout: str = "auto") -> Imported:
    """Write the checkpoint `out` from a folder, for `target`, replacing an earlier import.
    Quantised weights become plain ones.

    Raises `UserError`, before anything is written, for a folder that fits no kind, and for an `out`
    that was not imported.
    """
    require_as_exported(folder)
    folder, damaged = open_weights(folder)
    if damaged:
        raise UserError(f"'{folder.path}' is damaged: {damaged[0]}. Fetch it again.")
    receiver = Receiver(target.info, target.weights, tokenizer=target.tokenizer)
    found = read(folder, receiver, layout)
    kind, values = own_kind(folder, found)
    found.kind, found.notes = kind.name, receiver.notes
    config = build_config(kind.name, values)
    with torch.device("meta"):  # sizes that the files do not have take no memory
        described = kind.drafter_class(config, target.info)
    assert isinstance(described, TrainableDrafter), "layouts are of kinds with weights"
    tensors = fit(found, described, folder, receiver)
    drafter = kind.drafter_class(config, target.info)
    floats = {value.dtype for value in tensors.values() if value.is_floating_point()}
    if len(floats) == 1:
        drafter.to(floats.pop())
    with replace_folder(out, STAGE, "import.overwrite", more=LATER_FILES) as fresh:
        save_drafter(drafter, fresh, target.info, tensors)
        load_weights(drafter, stored_weights(fresh))  # finite, complete, and readable
        files = [file_entry(fresh, path.name) for path in sorted(fresh.iterdir())]
        source = str(folder.path.resolve())
        write_manifest(fresh, STAGE, {"kind": found.kind, "source": source, "files": files})
    return found


def read(folder: Folder, receiver: Receiver, layout: str) -> Imported:
    """The drafter in a folder; raises `UserError` also for a config.json without a needed key, or
    with a value of another type."""
    try:
        name = recognise(folder) if layout == "auto" else layout
        found: Imported = READERS[name].read(folder, receiver)
    except UserError:
        raise
    except (KeyError, TypeError, IndexError, ValueError, AttributeError) as error:
        raise UserError(
            f"'{folder.path}': config.json does not describe its drafter ({error!r}). Correct "
            "the key, or fetch the folder again."
        ) from error
    return found


def require_as_exported(folder: Folder) -> None:
    """Raise `UserError` for a folder of `headstart export` in which a file is missing or was
    changed."""
    for name, digest in folder.export.files.items():
        file = Path(name).name
        if not (folder.path / file).is_file():
            raise UserError(
                f"'{folder.path}' lacks {file}, which was exported. Export the drafter again."
            )
        verify_file(folder.path, {"file": file, "sha256": digest})


def own_kind(folder: Folder, found: Imported) -> tuple[Kind, Json]:
    """The kind and configuration: those in the export's notes if they are of the method that was
    read. The notes restore what the layout cannot store, and kinds that are stored in another
    kind's layout."""
    kind, notes = get_kind(found.kind), folder.export
    if notes.config and notes.kind in kind_names():
        own = get_kind(notes.kind)
        method = own.export_method(build_config(own.name, notes.config))
        if method == kind.export_method(build_config(kind.name, found.config)):
            return own, notes.config
    return kind, found.config


def recognise(folder: Folder) -> str:
    """The layout of a folder; raises `UserError` if it is none that can be read."""
    for name, module in READERS.items():
        if module.matches(folder):
            return name
    raise UserError(
        f"'{folder.path}' is of no layout that we read ({', '.join(READERS)}): its class is "
        f"'{folder.architecture}' and its tensors begin with {sorted(folder.tensors)[:4]}."
    )


def fit(
    found: Imported, drafter: TrainableDrafter, folder: Folder, receiver: Receiver
) -> dict[str, Tensor]:
    """The tensors under our names, without copies of the target's tensors; names and shapes are
    checked."""
    where, kind = f"'{folder.path}'", f"a drafter of kind '{found.kind}'"
    wanted, tensors = drafter.state_dict(), dict(found.tensors)
    for name in sorted(set(tensors) - set(wanted)):
        if not receiver.is_shared(name.removeprefix("model."), tensors.pop(name)):
            raise UserError(f"{where}: '{name}' has no place in {kind}.")
    missing = sorted(set(wanted) - set(tensors))
    if missing:
        raise UserError(f"{where} lacks {missing[:6]} of {kind}.")
    for name, value in tensors.items():
        if value.shape != wanted[name].shape:
            sizes = f"{list(value.shape)}, {kind} needs {list(wanted[name].shape)}"
            raise UserError(f"{where}: '{name}' has shape {sizes}.")
        if value.is_floating_point() and not bool(torch.isfinite(value).all()):
            raise UserError(f"{where}: '{name}' holds values that are not finite.")
    return tensors
