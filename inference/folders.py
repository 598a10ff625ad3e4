"""Whose a folder is, what its name may be, and the only ways to delete or replace one.

Settings name folders below a run (`require_folder_name`). A folder belongs to the stage that its
record names (`stage_of`): run.json of a stage that can be continued, manifest.json, or
headstart_export.json. Nothing is deleted or replaced that does not belong to the stage which asks
for it (`require_own`).
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from heads.api.errors import UserError
from inference.manifest import MANIFEST_FILE, is_abandoned, partial_of

RUN_FILE = "run.json"
EXPORT_FILE = "headstart_export.json"
CACHES = ("__pycache__",)
"""Folders that other programs put into ours and that hold nothing of their own."""
FEEDBACK = "feedback"


def require_folder_name(key: str, name: str, *, empty: bool = False) -> str:
    """Return `name` if it is the name of one folder; raises `UserError`, which names the setting
    `key`, otherwise. empty: "" is allowed (it stands for a default)."""
    plain = name not in (".", "..") and not set(name) & set("/\\") and name.isprintable()
    if not plain or not (name or empty):
        raise UserError(
            f"{key}: '{name}' must be a plain folder name, without '/' or '\\' and not '.' or "
            "'..'. Folders above it are set with run.root and run.name."
        )
    return name


def stage_of(folder: Path) -> str:
    """The stage that wrote `folder`, as its record says; empty for a folder without a record of
    ours. Raises `UserError` for a record that is not readable."""
    record = _read(folder / RUN_FILE)
    if record is not None:
        return str(record.get("stage") or "")
    manifest = _read(folder / MANIFEST_FILE) or {}
    if manifest.get("stage"):
        return FEEDBACK if FEEDBACK in manifest else str(manifest["stage"])
    return "export" if (folder / EXPORT_FILE).is_file() else ""


def require_own(folder: Path, stage: str, setting: str, beside: Collection[str] = ()) -> None:
    """Raise `UserError` unless deleting `folder` loses nothing but what `stage` has written.

    It must be absent, empty, or have a record of `stage`; hold no folder of another stage; and
    where the record lists the files, hold no others but `beside`. setting: the key that asks for
    the deletion, for the message.
    """
    refuse = f"{setting}: '{folder}' is not deleted: "
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise UserError(f"{refuse}it is not a folder but a link or a file. Remove it yourself.")
    if not folder.exists() or not any(folder.iterdir()):
        return
    found = stage_of(folder)
    if not found:
        raise UserError(
            f"{setting}: '{folder}' is not a stage folder and is not deleted: it has no record of "
            "ours that says who wrote it. Remove it yourself, or choose another folder."
        )
    if found != stage:
        raise UserError(
            f"{refuse}stage '{found}' wrote it, not '{stage}'. Choose another name, or remove it "
            "yourself."
        )
    allowed = ("", stage, "export" if stage == "push" else "")
    for record in (RUN_FILE, MANIFEST_FILE, EXPORT_FILE):
        for inner in folder.rglob(record):
            other = "" if inner.parent == folder else stage_of(inner.parent)
            if other not in allowed:
                raise UserError(
                    f"{refuse}'{inner.parent}' in it was written by stage '{other}'. Move that "
                    "away first."
                )
    listed = _listed(folder)
    foreign = [] if listed is None else sorted({*_files(folder)} - listed - {*beside})
    if foreign:
        raise UserError(
            f"{refuse}it holds files that stage '{stage}' did not write: {', '.join(foreign[:3])}. "
            "Move them away, or remove the folder yourself."
        )


def delete_own(folder: Path, stage: str, setting: str) -> None:
    """Delete `folder`, if it is `stage`'s own; see `require_own`."""
    require_own(folder, stage, setting)
    if folder.exists():
        shutil.rmtree(folder)


@contextmanager
def replace_folder(
    out: Path, stage: str, setting: str, beside: Collection[str] = ()
) -> Iterator[Path]:
    """Yield an empty folder next to `out` that takes its name when the block ends without an error.

    An `out` that is there must be `stage`'s own (see `require_own`) and is deleted just before. The
    empty folder has a name of its own, so nothing of anybody else is in the way; after an error it
    is removed.
    """
    if out.name in ("", ".."):
        raise UserError(
            f"{setting}: '{out}' is not a name for a new folder. Give a folder with a name."
        )
    require_own(out, stage, setting, beside)
    out.parent.mkdir(parents=True, exist_ok=True)
    for leftover in out.parent.iterdir():
        if (
            leftover.name.startswith(f"{out.name}.")
            and leftover.is_dir()
            and is_abandoned(leftover)
        ):
            shutil.rmtree(leftover)  # of a writer that was killed
    fresh = partial_of(out)
    try:
        fresh.mkdir()
        yield fresh
        require_own(out, stage, setting, beside)
        if out.exists():
            shutil.rmtree(out)
        os.replace(fresh, out)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _read(file: Path) -> dict[str, Any] | None:
    if not file.is_file():
        return None
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(
            f"'{file}' is broken ({error}), so it is not known whose folder '{file.parent}' is. "
            "Remove the folder yourself, or choose another name."
        ) from error
    return content if isinstance(content, dict) else None


def _listed(folder: Path) -> set[str] | None:
    """The files that the folder's record lists, itself included; None where it lists none."""
    if (folder / RUN_FILE).is_file():
        return None
    manifest, export = _read(folder / MANIFEST_FILE), _read(folder / EXPORT_FILE)
    if manifest is not None and isinstance(manifest.get("files"), list):
        entries = [entry for entry in manifest["files"] if isinstance(entry, dict)]
        return {MANIFEST_FILE, *(str(entry["file"]) for entry in entries if "file" in entry)}
    return {*map(str, export.get("files", ())), EXPORT_FILE} if export is not None else None


def _files(folder: Path) -> Iterator[str]:
    """Relative paths of everything but folders in `folder`, without those in `CACHES`."""
    for path in folder.rglob("*"):
        relative = path.relative_to(folder)
        if (path.is_symlink() or not path.is_dir()) and not set(relative.parts) & set(CACHES):
            yield relative.as_posix()
