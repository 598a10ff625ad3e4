"""How stages exchange data: one `manifest.json` per output folder, and checks that the listed files
are unchanged.

A manifest is written last and atomically, so its presence means that the stage finished. Paths in
it are relative and cannot leave their folder. docs/formats.md lists the fields of every stage.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import socket
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar, Unpack, cast

from typing_extensions import TypedDict

from heads.api.checkpoint import weights_file
from heads.api.config import shown
from heads.api.errors import UserError
from heads.api.reading import file_sha256 as file_sha256
from heads.api.reading import read_object, require_fit

FORMAT = 1
LARGEST = 64 * 1024 * 1024
"""Largest size of a manifest in bytes; the largest of ours lists some ten thousand shards."""
MANIFEST_FILE = "manifest.json"
PARTIAL = ".partial"
STALE_SECONDS = 600.0
"""Age in seconds of an unchanged file after which its writer on another machine counts as gone."""
_PARTIAL_NAME = re.compile(r"\.(?P<pid>\d+)-[0-9a-f]{8}@(?P<host>[^@]+)\.partial$")


T = TypeVar("T")


class FileSize(TypedDict, total=False):
    """The size of a listed file, where the stage gives one."""

    rows: int
    bytes: int


class FileEntry(FileSize):
    """A manifest's entry for one file."""

    file: str
    """Path relative to the manifest's folder."""
    sha256: str


def write_manifest(
    directory: Path,
    stage: str,
    content: Mapping[str, object],
    provenance: Mapping[str, object] | None = None,
) -> Path:
    """Write `directory/manifest.json` atomically and return its path: `format` and `stage`, then
    `content`, then `provenance` (command, versions, device, ...) under its own key."""
    assert not {"format", "stage", "provenance"} & set(content), "these are written here"
    last = {} if provenance is None else {"provenance": dict(provenance)}
    path = directory / MANIFEST_FILE
    write_json(path, {"format": FORMAT, "stage": stage, **content, **last})
    return path


def read_manifest(directory: Path, stage: str) -> dict[str, Any]:
    """The manifest of a finished stage; raises `UserError` if there is none or another stage wrote
    it."""
    path = directory / MANIFEST_FILE
    if not path.is_file():
        raise UserError(
            f"'{directory}' holds no finished '{stage}' stage: there is no {MANIFEST_FILE}. Run "
            f"`headstart {stage}` for that run first (an interrupted one continues), or give the "
            "folder of a finished one."
        )
    content = read_object(path, "Run the stage again.", LARGEST)
    if content.get("format") != FORMAT:
        given = shown(content.get("format"))
        raise UserError(
            f"'{path}' has manifest format {given}; this version reads format {FORMAT}."
        )
    if content.get("stage") != stage:
        raise UserError(
            f"'{directory}' was written by stage {shown(content.get('stage'))}, but the output of "
            f"'{stage}' is needed here."
        )
    return content


def read_manifest_as(kind: type[T], directory: Path, stage: str) -> T:
    """`read_manifest` for a stage whose manifest has a `TypedDict`; raises `UserError` also where a
    key is missing or of another type."""
    content = read_manifest(directory, stage)
    return require_fit(kind, content, f"'{directory / MANIFEST_FILE}'", "Run the stage again.")


def write_json(path: Path, content: Any) -> None:
    """Write JSON atomically: after a kill, either the old or the new file is complete."""
    write_bytes(path, (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode("utf-8"))


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file atomically (temporary file in the same folder, then rename); creates the folder.

    Several processes may write the same file at once: each has a separate temporary file, and the
    last rename wins. A kill leaves the temporary file behind, see `remove_leftovers`; an error does
    not.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = partial_of(path)
    try:
        with partial.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def remove_leftovers(folder: Path) -> None:
    """Remove the temporary files of `write_bytes`, here and below, whose writer is gone: it ended
    on this machine, or it was on another machine and the file is unchanged for `STALE_SECONDS`."""
    for path in folder.rglob(f"*{PARTIAL}"):
        if path.is_file() and is_abandoned(path):
            path.unlink(missing_ok=True)


def partial_of(path: Path) -> Path:
    """A temporary name next to `path` that identifies the writing process."""
    token = secrets.token_hex(4)
    writer = f"{os.getpid()}-{token}@{socket.gethostname()}+{_mark()}"
    return path.with_name(f"{path.name}.{writer}{PARTIAL}")


def name_of(partial: Path) -> str:
    """The name for which `partial_of` made a temporary one; empty for any other name."""
    found = _PARTIAL_NAME.search(partial.name)
    return partial.name[: found.start()] if found else ""


def is_abandoned(path: Path) -> bool:
    """Whether `path` has a name from `partial_of` and its writer is gone; see
    `remove_leftovers`."""
    found = _PARTIAL_NAME.search(path.name)
    if found is None:
        return False
    host, _, mark = found["host"].partition("+")
    if host == socket.gethostname() and mark in ("", _mark()):  # earlier versions leave no mark
        return not alive(int(found["pid"]))
    try:
        return time.time() - path.stat().st_mtime > STALE_SECONDS
    except FileNotFoundError:  # it has just been given its final name
        return False


@cache
def machine() -> str:
    """An identifier of this machine since its start, and of this container. Others may have the
    same name, and their process ids mean other processes."""
    parts = []
    with suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip())
        parts.append(str(Path("/proc/self/ns/pid").readlink()))
    return " ".join(parts)


def _mark() -> str:
    return hashlib.sha256(machine().encode()).hexdigest()[:8]


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):  # also: a number that is no process id
        return False
    except PermissionError:
        return True
    return True


def file_entry(directory: Path, relative: str, **size: Unpack[FileSize]) -> FileEntry:
    digest = file_sha256(safe_path(directory, relative))
    return {"file": relative, **size, "sha256": digest}


def verify_file(directory: Path, entry: FileEntry) -> Path:
    """The path of a listed file. Raises `UserError` when it does not lie inside `directory`, is
    missing or was changed."""
    try:
        relative, expected = entry["file"], entry["sha256"]
    except (KeyError, TypeError) as error:
        message = "lists a file without path or sha256. Run the stage again."
        raise UserError(f"the manifest in '{directory}' {message}") from error
    path = safe_path(directory, relative)
    if not path.is_file():
        raise UserError(
            f"'{path}' is listed in the manifest but is not there. Copy the whole folder, or run "
            "the stage again."
        )
    found = file_sha256(path)
    if found != expected:
        raise UserError(
            f"'{path}' was changed or damaged since it was written: its sha256 is "
            f"{found[:12]}..., the manifest says {str(expected)[:12]}.... Copy it again, or "
            "delete the folder and run the stage again."
        )
    return path


def listed_files(directory: Path, stage: str) -> list[FileEntry]:
    """The files that the manifest of a finished stage lists. Raises `UserError` for a manifest
    without a list of path and sha256, since it may come from somebody else."""
    entries = read_manifest(directory, stage).get("files")
    for entry in entries if isinstance(entries, list) else [None]:
        if not isinstance(entry, dict) or not all(
            isinstance(entry.get(key), str) for key in ("file", "sha256")
        ):
            raise UserError(
                f"the manifest in '{directory}' lists no files by path and sha256 (found: "
                f"{shown(entry if isinstance(entries, list) else entries)}). Run the stage again."
            )
    return cast(list[FileEntry], entries)


def verify_listed(directory: Path, stage: str, names: Iterable[str]) -> None:
    """Raise `UserError` unless these files of `stage`, except its manifest, are as the manifest
    lists them."""
    listed = {entry["file"]: entry for entry in listed_files(directory, stage)}
    for name in (name for name in names if name != MANIFEST_FILE):
        if name not in listed:
            raise UserError(
                f"'{directory / name}' is not in the folder's {MANIFEST_FILE}. Build it again with "
                f"`headstart {stage}`."
            )
        verify_file(directory, listed[name])


def safe_path(directory: Path, relative: str) -> Path:
    """`directory / relative`; raises `UserError` for a path that would leave the folder."""
    pure = PurePosixPath(relative) if isinstance(relative, str) else PurePosixPath("/")
    path = directory / pure
    if (
        pure.is_absolute()
        or ".." in pure.parts
        or set("\\\0") & set(str(relative))
        or not path.resolve().is_relative_to(directory.resolve())
    ):
        raise UserError(
            f"the manifest in '{directory}' names {relative!r}, which lies outside its folder. It "
            "was not written by us; refused."
        )
    return path


def checkpoint_hash(folder: str | Path) -> str:
    """SHA-256 of a checkpoint's weights; of an adapter, that of its updates (which include the
    base's hash). Empty if there are no weights."""
    path = weights_file(Path(folder))
    return file_sha256(path) if folder and path.is_file() else ""
