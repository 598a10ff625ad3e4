"""Owners and names of folders, and the only functions that delete, replace or copy them.

Settings name folders below a run (`require_folder_name`). A folder belongs to the stage that its
record names (`stage_of`): run.json of a stage that can be continued, manifest.json, or
headstart_export.json. A stage deletes or replaces only folders that belong to it (`require_own`). A
message names the folder before it is deleted, and files in it that the stage did not write are
moved aside. Links are neither followed nor deleted. No other module deletes, renames or copies
folders (tests/test_layers.py).
"""

from __future__ import annotations

import glob
import logging
import os
import secrets
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from heads.api.adapter import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from heads.api.errors import UserError
from heads.api.reading import read_json
from inference.manifest import (
    LARGEST,
    MANIFEST_FILE,
    PARTIAL,
    is_abandoned,
    name_of,
    partial_of,
    remove_leftovers,
)
from inference.writers import beside, is_writer_file, only_writer

logger = logging.getLogger(__name__)

RUN_FILE = "run.json"
EXPORT_FILE = "headstart_export.json"
CACHES = ("__pycache__",)
"""Folders that other programs create in ours and that contain nothing of value."""
FEEDBACK = "feedback"
FORMER = ".former"
"""Suffix of a folder's name while another folder takes its place."""
ASIDE = ".aside-"
"""In the names of folders with files that were moved aside."""
WITHIN = {"push": ("export",), "learn": (FEEDBACK, "train")}
"""Stage -> stages whose folders lie inside its folder."""
PARTS = {
    "parts": ("*.parquet", "served.json"),
    "shards": ("shard-*.parquet",),
    "packed": ("*/packed.json", "*/*.bin"),
    "input": ("*.json", "*.bin", "*.jsonl", "rows-*.parquet", "keys/*"),
    "records": ("*.parquet", "records.json", "*/records.json"),
    "states": ("*.safetensors",),
}
"""Folder that a stage keeps inside its own -> patterns of the files that it writes there. In other
folders, every file counts as the stage's."""
ANSWERS = tuple(
    f"{part}/{name}"
    for part in ("shards", "packed", "input", "records", "states")
    for name in PARTS[part]
)
CHECKPOINT = (
    "config.json",
    "model.safetensors",
    "updates.safetensors",
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    MANIFEST_FILE,
    "decode.yaml",
    "draft.json",
    "watch.json",
)
"""A checkpoint's files, including those that later stages put beside its weights."""
TRAINING = (
    *(f"best/{name}" for name in CHECKPOINT),
    "checkpoints/step_*",
    "target/*",
    "log.jsonl",
    "summary.json",
    "tau.png",
    "tensorboard/*",
    "wandb/*",
    "wandb-id.txt",
    "trackio-id.txt",
    "mlflow-id.txt",
)
WRITTEN = {
    "generate": (
        "generate.json",
        "failures.jsonl",
        *(f"parts/{name}" for name in PARTS["parts"]),
        ".lock",
        *ANSWERS,
    ),
    "feedback": (
        "hard_prompts.jsonl",
        "branches.jsonl",
        "variations.jsonl",
        "variations.partial.jsonl",
        *ANSWERS,
    ),
    "features": ("store.json", "shards/rows-*", "index/rows-*", "claims/rows-*", ".lock"),
    "train": TRAINING,
    "measure": (
        "report.json",
        "transcripts.json",
        "records.jsonl",
        "records.partial.jsonl",
        "windows.jsonl",
        "windows.partial.jsonl",
        *(f"records/{name}" for name in PARTS["records"]),
    ),
    "audit": ("audit.json", "audit.md"),
    "watch": ("staleness.json", "watch.json"),
    "refresh": ("refresh.json", "seconds.json", *TRAINING),
    "tune": ("tune.json",),
    "traffic": ("traffic.json",),
}
WRITTEN["learn"] = (
    "validation.jsonl",
    "measuring.jsonl",
    *(f"records/{name}" for name in PARTS["records"]),
    *(f"feedback/{name}" for name in (MANIFEST_FILE, *WRITTEN[FEEDBACK])),
    *(f"train/{name}" for name in (MANIFEST_FILE, *TRAINING)),
)
"""Stage -> patterns of the files that it writes into its folder, for stages whose record does not
list them."""


OTHER_FOLDERS = (
    "generate features train plan export push tune traffic audit watch refresh feedback learn"
).split()
"""Names that other stages give to folders of a run."""


def require_folder_name(key: str, name: str, *, empty: bool = False) -> str:
    """Return `name` if it is the name of one folder; raises `UserError`, which names the setting
    `key`, otherwise. empty: "" is allowed (it stands for a default)."""
    plain = name not in (".", "..") and not set(name) & set("/\\") and name.isprintable()
    if not plain or not (name or empty):
        raise UserError(
            f"{key}: {name!r} must be a plain folder name, without '/' or '\\' and not '.' or "
            "'..'. Folders above it are set with run.root and run.name."
        )
    return name


def require_measurement_name(key: str, name: str) -> str:
    """The same for a measurement's folder, which must not be another stage's."""
    if name in OTHER_FOLDERS:
        raise UserError(
            f"{key}: '{name}' is the folder of another stage in a run. Choose another name."
        )
    return require_folder_name(key, name)


def stage_of(folder: Path) -> str:
    """The stage that wrote `folder`, according to its record; empty for a folder without a record.
    Raises `UserError` for a record that is not readable."""
    record = _read(folder / RUN_FILE)
    if record is not None:
        return str(record.get("stage") or "")
    manifest = _read(folder / MANIFEST_FILE) or {}
    if manifest.get("stage"):
        return FEEDBACK if FEEDBACK in manifest else str(manifest["stage"])
    return "export" if (folder / EXPORT_FILE).is_file() else ""


def require_own(folder: Path, stage: str, setting: str) -> None:
    """Raise `UserError` unless `stage` may delete or replace `folder`.

    The folder must be absent, empty, or have a record of `stage`, and contain no folder of another
    stage. setting: the key that asks for the deletion, for the message.
    """
    refuse = f"{setting}: '{folder}' is not deleted: "
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise UserError(f"{refuse}it is not a folder but a link or a file. Remove it yourself.")
    if not folder.exists() or all(is_writer_file(path.name) for path in folder.iterdir()):
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
    allowed = ("", stage, *WITHIN.get(stage, ()))
    for inner in _records(folder):
        other = "" if inner == folder else stage_of(inner)
        if other not in allowed:
            raise UserError(
                f"{refuse}'{inner}' in it was written by stage '{other}'. Move that away first."
            )


def delete_own(folder: Path, stage: str, setting: str) -> None:
    """Delete what `stage` wrote in `folder`, after a message, if the folder belongs to the stage
    (see `require_own`). Files that the stage did not write are moved aside, next to the folder."""
    require_own(folder, stage, setting)
    if not folder.is_dir():
        return
    _move_aside(folder, _known(folder, stage))
    _announce(folder, stage, setting)
    # the record last: after a kill it still says whose folder this is
    for path in sorted(folder.iterdir(), key=lambda path: path.name == RUN_FILE):
        if path.is_dir() and not path.is_symlink():
            _remove(path)
        elif not is_writer_file(path.name):  # this process holds the folder
            path.unlink()
    with suppress(OSError):
        folder.rmdir()


@contextmanager
def replace_folder(
    out: Path, stage: str, setting: str, more: Collection[str] = ()
) -> Iterator[Path]:
    """Yield an empty folder next to `out` that takes its name when the block ends without an error.

    An existing `out` must belong to `stage` (see `require_own`) and is deleted at that point. Files
    in it that its record does not list, and that are not named in `more`, are moved aside. The
    empty folder has a unique name, so it cannot collide with another process's; after an error it
    is removed. Raises `UserError` while another process replaces the same folder.
    """
    if out.name in ("", ".."):
        raise UserError(
            f"{setting}: '{out}' is not a name for a new folder. Give a folder with a name."
        )
    require_own(out, stage, setting)
    out.parent.mkdir(parents=True, exist_ok=True)
    with only_writer(*beside(out)):
        for leftover in out.parent.glob(f"{glob.escape(out.name)}.*"):
            if name_of(leftover) == out.name and leftover.is_dir() and is_abandoned(leftover):
                shutil.rmtree(leftover)  # left by a writer that was killed
        restore(out)
        fresh = partial_of(out)
        try:
            fresh.mkdir()
            yield fresh
            require_own(out, stage, setting)
            if out.is_dir():
                _move_aside(out, (*_known(out, stage), *more))
                _announce(out, stage, setting)
            put(fresh, out)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)


@contextmanager
def replace_part(out: Path, known: Collection[str]) -> Iterator[Path]:
    """Yield an empty folder that takes the place of `out` when the block ends without an error.

    For a folder that a stage keeps inside its own. known: patterns of the files in it that may be
    deleted; others are moved aside. Raises `UserError` for an `out` that is a link or a file.
    """
    if out.is_symlink() or out.is_file():
        raise UserError(
            f"'{out}' is not a folder but a link or a file, and is not replaced. Remove it."
        )
    restore(out)
    fresh = partial_of(out)
    try:
        fresh.mkdir(parents=True)
        yield fresh
        _flush(fresh)
        if out.is_dir():
            _move_aside(out, known)
        put(fresh, out)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def put(fresh: Path, out: Path) -> None:
    """Give `fresh` the name `out`, then delete the folder that had it. After a kill in between,
    `restore` repairs the state."""
    former = None
    if out.is_dir():
        former = partial_of(out).with_suffix(FORMER)
        out.rename(former)
    try:
        fresh.rename(out)
    except OSError:
        if former is not None:
            former.rename(out)
        raise
    if former is not None:
        shutil.rmtree(former, ignore_errors=True)


def put_new(fresh: Path, out: Path) -> None:
    """Give `fresh` the name `out`; raises `UserError` if something else has that name by now."""
    try:
        fresh.rename(out)
    except OSError as error:
        if not out.exists():
            raise
        raise UserError(
            f"'{out}' has come into being meanwhile, and is not replaced. Give another folder."
        ) from error


def restore(out: Path) -> None:
    """Give a folder back the name that a killed `put` took from it, or remove what a killed `put`
    left. The caller holds the folder, so no other `put` is under way."""
    for former in out.parent.glob(f"{glob.escape(out.name)}.*{FORMER}"):
        if name_of(former.with_suffix(PARTIAL)) != out.name:
            continue  # belongs to a folder whose name begins alike
        if out.exists():
            shutil.rmtree(former, ignore_errors=True)
        else:
            former.rename(out)


def discard(part: Path, stages: Collection[str] = ()) -> None:
    """Delete a folder that a stage keeps inside its own; a missing folder is no error.

    Files in it that the stage does not write there (`PARTS`) are moved aside, next to it. Raises
    `UserError` for a link, and for a folder in which a stage has left a record, unless it is one of
    `stages`, which the caller has run there.
    """
    if part.is_symlink():
        raise UserError(f"'{part}' is a link and is not deleted. Remove it yourself.")
    for inner in _records(part):
        if stage_of(inner) not in ("", *stages):
            raise UserError(
                f"'{part}' is not deleted: stage '{stage_of(inner)}' wrote '{inner}'. Move that "
                "away first."
            )
    if part.name in PARTS:
        _move_aside(part, PARTS[part.name])
    _remove(part)


def sweep(folder: Path) -> None:
    """Remove the temporary files and folders, here and below, whose writers are gone."""
    remove_leftovers(folder)
    for path in folder.rglob(f"*{PARTIAL}"):
        if path.is_dir() and not path.is_symlink() and is_abandoned(path):
            shutil.rmtree(path, ignore_errors=True)


def is_aside(name: str) -> bool:
    """Whether a folder of this name holds files that were moved aside."""
    return ASIDE in name


def is_temporary(name: str) -> bool:
    """Whether a folder of this name is temporary: being written, replaced or deleted."""
    return name.endswith((PARTIAL, FORMER))


def plain_files(folder: Path) -> list[str]:
    """Relative paths of all files except those in `CACHES`. Raises `UserError` for a link (its
    target may be private), for anything else that is no file, and for a name that is not UTF-8."""
    names = []
    for path in sorted(folder.rglob("*")):
        relative = path.relative_to(folder)
        if any("\udc80" <= char <= "\udcff" for char in path.name):
            raise UserError(
                f"{str(path)!r} has a name that is not UTF-8, which no manifest can list. Give it "
                "another name, or remove it."
            )
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise UserError(
                f"'{path}' is not a plain file but a link or a device, which is not followed. "
                "Remove it, or put a copy in its place."
            )
        if path.is_file() and not set(relative.parts) & set(CACHES):
            names.append(relative.as_posix())
    return names


def require_no_link(path: Path, below: Path) -> None:
    """Raise `UserError` if a link stands on the way from the folder `below` to `path` in it, or if
    a `path` that lies elsewhere is a link."""
    way = [path, *path.parents]
    for part in way[: way.index(below) if below in way else 1]:
        if part.is_symlink():
            raise UserError(
                f"'{part}' is a link, which is not followed to what is published. Put a copy in "
                "its place."
            )


def copy_plain(source: Path, out: Path) -> None:
    """Copy a file, or a folder's files; raises `UserError` for a link (see `plain_files`)."""
    if source.is_symlink():
        raise UserError(f"'{source}' is a link, which is not followed. Put a copy in its place.")
    if not source.is_dir():
        out.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, out)
        return
    out.mkdir(parents=True, exist_ok=True)
    for name in plain_files(source):
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source / name, out / name)


def _flush(folder: Path) -> None:
    """Bring the files of a folder to the disk, so that a power failure leaves none empty."""
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            with path.open("rb") as file:
                os.fsync(file.fileno())


def _announce(folder: Path, stage: str, setting: str) -> None:
    """Print what is deleted, and which setting asks for it."""
    files = [path for path in folder.rglob("*") if not path.is_dir()]
    logger.warning(
        "%s: deleting '%s', which stage '%s' wrote (%d files, %s bytes)",
        setting,
        folder,
        stage,
        len(files),
        f"{sum(path.lstat().st_size for path in files):,}",
    )


def _remove(part: Path) -> None:
    """Delete a folder, after renaming it so that it has lost its name before its first file is
    deleted."""
    gone = partial_of(part)
    with suppress(FileNotFoundError):  # another process was faster
        part.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


def _records(folder: Path) -> Iterator[Path]:
    """Folders, including this one, with a file that may be a stage's record."""
    for record in (RUN_FILE, MANIFEST_FILE, EXPORT_FILE):
        for path in folder.rglob(record):
            yield path.parent


def _move_aside(folder: Path, known: Collection[str]) -> None:
    """Move the files of `folder` that match no pattern of `known` to a folder next to it."""
    foreign = [name for name in _files(folder) if not any(fnmatch(name, one) for one in known)]
    if not foreign:
        return
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S")
    aside = folder.with_name(f"{folder.name}{ASIDE}{stamp}-{secrets.token_hex(2)}")
    for name in foreign:
        (aside / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).rename(aside / name)
    more = f" and {len(foreign) - 3} more" if len(foreign) > 3 else ""
    logger.warning(
        "'%s' holds files that are not ours; moved to '%s': %s%s",
        folder,
        aside,
        ", ".join(foreign[:3]),
        more,
    )


def _known(folder: Path, stage: str) -> tuple[str, ...]:
    """Patterns of the files in a stage's folder that the stage wrote: those that its record lists,
    or those of `WRITTEN`."""
    if not (folder / RUN_FILE).is_file():
        manifest, export = _read(folder / MANIFEST_FILE), _read(folder / EXPORT_FILE)
        if manifest is not None and isinstance(manifest.get("files"), list):
            entries = [entry for entry in manifest["files"] if isinstance(entry, dict)]
            listed = [str(entry["file"]) for entry in entries if "file" in entry]
            return (MANIFEST_FILE, *map(glob.escape, listed))
        if export is not None:
            files = export.get("files")
            names = map(str, files if isinstance(files, dict) else ())
            return (EXPORT_FILE, *map(glob.escape, names))
    return (RUN_FILE, MANIFEST_FILE, "config.yaml", *WRITTEN.get(stage, ()))


def _read(file: Path) -> dict[str, Any] | None:
    if not file.is_file():
        return None
    advice = (
        f"So it is not known whose folder '{file.parent}' is: remove it yourself, or choose "
        "another name."
    )
    content = read_json(file, advice, LARGEST)
    return content if isinstance(content, dict) else None


def _files(folder: Path) -> Iterator[str]:
    """Relative paths of everything in `folder` except folders, files in `CACHES`, temporary files
    and the files of writers."""
    for path in sorted(folder.rglob("*")):
        relative = path.relative_to(folder)
        passing = is_writer_file(path.name) or bool(set(relative.parts) & set(CACHES))
        passing = passing or any(part.endswith(PARTIAL) for part in relative.parts)
        if not passing and (path.is_symlink() or not path.is_dir()):
            yield relative.as_posix()
