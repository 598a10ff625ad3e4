"""One writer per folder: a process that writes claims the folder with a file in it, and a second
process is refused.

The file names host, process and start, and its writer touches it every `BEAT_SECONDS`. When the
writer has ended, another process may take the file over. On the same machine this is possible at
once, after a kill -9 too. From another machine it is possible after `SILENT_SECONDS` without a
touch, by the file system's own clock. The kernel's locks (flock) only prevent processes of one
machine from taking over at the same moment: on many shared file systems they do not reach other
machines.

The processes of one launch are one writer. Its main process has the file, and each other process
has a separate one. These files show which processes outlive a killed main process.
"""

from __future__ import annotations

import atexit
import glob
import json
import logging
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from heads.api.config import build
from heads.api.errors import UserError
from heads.api.reading import read_object
from inference.manifest import PARTIAL, alive, is_abandoned, machine, partial_of

logger = logging.getLogger(__name__)

WRITER_FILE = ".writer.json"
BEAT_SECONDS = 15.0
SILENT_SECONDS = 180.0
"""Seconds since its last touch after which a writer on another machine counts as gone."""
_PATIENCE_SECONDS, _LOOK_SECONDS = 10.0, 0.5
"""How long, beyond `SILENT_SECONDS`, a restarted rank waits for the one that it replaces, and how
often it checks."""
_NAME = re.compile(r"\.(.+\.)?writer(-\d+)?\.json")
_TURN_FILE, _TURN_SECONDS = ".turn.json", 0.02
_TRIES = 5
_LARGEST = 65_536
"""Largest size in bytes of a writer's file."""
_UNKNOWN = "an unknown machine"


@dataclass(frozen=True)
class Writer:
    """A process that writes, as described in its file. age: seconds since its last touch."""

    host: str = ""
    machine: str = ""
    """The start of the machine and the space of process ids; empty in older files."""
    pid: int = 0
    ticks: int = 0
    """When the process started, in the kernel's units; 0 if unknown."""
    started: str = ""
    """When the process began to write (UTC)."""
    launch: str = ""
    """The launcher's id and address; empty for a process without a launcher."""
    launcher: int = 0
    """The parent process."""
    token: str = ""
    age: float = field(default=0.0, compare=False)

    @classmethod
    def this(cls) -> Writer:
        """The calling process, with a new token for every call."""
        return cls(
            host=socket.gethostname(),
            machine=machine(),
            pid=os.getpid(),
            ticks=_ticks(os.getpid()),
            started=datetime.now(UTC).isoformat(timespec="seconds"),
            launch=_launch(),
            launcher=os.getppid(),
            token=secrets.token_hex(8),
        )

    @property
    def is_here(self) -> bool:
        """Whether its process id is valid on this machine."""
        return self.host == socket.gethostname() and self.machine in ("", machine())

    def gone(self, silent: float = SILENT_SECONDS) -> bool:
        """Whether it has ended or, on another machine, has not touched its file for `silent`
        seconds."""
        return not _runs(self.pid, self.ticks) if self.is_here else self.age > silent

    def of_one_launch(self, other: Writer) -> bool:
        """Whether both are processes of the same launch."""
        near = not (self.is_here and other.is_here) or self.launcher == other.launcher
        return bool(self.launch) and self.launch == other.launch and near

    def __str__(self) -> str:
        since = f" since {self.started}" if self.started else ""
        return f"process {self.pid} on {self.host}{since}, last sign of life {self.age:.0f} s ago"


# Files of writers


def take(path: Path, own: Writer, silent: float = SILENT_SECONDS) -> Writer | None:
    """Make `path` the file of `own`. Returns the living writer that has it already, or None when it
    was taken. Raises `OSError` if it cannot be written; nothing of it is left in that case."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = asdict(own)
    del content["age"]
    mine, found = partial_of(path), None
    try:
        mine.write_bytes(json.dumps(content).encode())
        with _alone_here(path.parent):
            for _ in range(_TRIES):
                if _give_name(mine, path):
                    _remove_leftovers(path)
                    return None
                os.utime(mine)
                found = read(path, now=mine.stat().st_mtime)
                if found is not None and not found.gone(silent):
                    return found
                if found is not None:
                    _put_away(path, found)
    finally:
        mine.unlink(missing_ok=True)
    return found or Writer(host=_UNKNOWN)


def read(path: Path, now: float | None = None) -> Writer | None:
    """The writer that has the file, or None. now: the file system's time. A file that is not
    readable counts as that of an unknown machine."""
    try:
        age = max(0.0, (time.time() if now is None else now) - path.stat().st_mtime)
    except OSError:
        return None
    try:
        content = read_object(path, most=_LARGEST)
        known = {item.name: content[item.name] for item in fields(Writer) if item.name in content}
        found = build(Writer, known, path.name)
        return replace(found, host=found.host or _UNKNOWN, age=age)
    except UserError as error:
        return None if isinstance(error.__cause__, FileNotFoundError) else Writer(_UNKNOWN, age=age)


def drop(path: Path, token: str) -> None:
    """Remove the file, unless another writer has taken it over."""
    with suppress(OSError):
        found = read(path)
        if found is not None and found.token == token:
            path.unlink()


def _give_name(mine: Path, path: Path) -> bool:
    """Whether `path` now is the file `mine`. A link is made completely or not at all, on a shared
    file system too; where links are not supported, an exclusive creation is used."""
    try:
        os.link(mine, path)
    except FileExistsError:
        return False
    except OSError:
        try:
            with path.open("xb") as file:
                file.write(mine.read_bytes())
        except FileExistsError:
            return False
    return True


def _remove_leftovers(path: Path) -> None:
    """Remove the files that killed processes left next to `path` while they took it."""
    for leftover in path.parent.glob(f"{glob.escape(path.name)}.*{PARTIAL}"):
        if is_abandoned(leftover):
            leftover.unlink(missing_ok=True)


def _put_away(path: Path, dead: Writer) -> None:
    """Remove the file of a dead writer. If the moved file turns out to belong to another writer, it
    is put back."""
    aside = partial_of(path)
    with suppress(FileNotFoundError):
        path.rename(aside)
        if read(aside) != dead:
            with suppress(OSError):
                os.link(aside, path)
        aside.unlink()


@contextmanager
def _alone_here(folder: Path) -> Iterator[None]:
    """Keep other processes of this machine out, if the file system can."""
    try:
        import fcntl
    except ImportError:  # no Unix
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


# Holding a folder


@dataclass
class Hold:
    """A folder that this process holds. If the process takes it again, it is held until it was
    given up as often. `made`: the folder did not exist before."""

    path: Path
    token: str
    made: bool
    count: int = 1

    def release(self) -> None:
        """Give the folder up; does nothing if that was done before."""
        self.count -= 1
        if self.count == 0 and _held.get(self.path) is self:
            del _held[self.path]
            drop(self.path, self.token)
            if self.made:
                with suppress(OSError):
                    self.path.parent.rmdir()  # nothing else was written to it


_held: dict[Path, Hold] = {}
"""File -> hold of this process."""
os.register_at_fork(after_in_child=_held.clear)


def hold(folder: Path, file: str = WRITER_FILE) -> Hold:
    """Hold `folder` exclusively; every process of a launch calls this. file: another name, where
    several stages write side by side. Raises `UserError` while another process holds the folder;
    the same process may hold it again."""
    rank = int(os.environ.get("RANK") or 0)
    place, me, made = folder.resolve(), Writer.this(), not folder.exists()
    main = place / file
    own = main if rank == 0 else place / _file_of(file, str(rank))
    if own in _held:
        _held[own].count += 1
        return _held[own]
    first = read(main) if rank else None
    if first is not None and not first.gone() and not first.of_one_launch(me):
        raise _refusal(folder, first)
    found = _take_in_launch(own, me)
    if found is not None:
        raise _refusal(folder, found)
    _held[own] = Hold(own, me.token, made)
    if rank == 0:
        try:
            _require_alone(folder, place, file, me)
        except UserError:
            _held[own].release()
            raise
    _start_beating()
    return _held[own]


@contextmanager
def only_writer(folder: Path, file: str = WRITER_FILE) -> Iterator[None]:
    """Hold `folder` for a block; see `hold`."""
    held = hold(folder, file)
    try:
        yield
    finally:
        held.release()


@contextmanager
def releasing() -> Iterator[None]:
    """Give up, at the end of a block, the folders that were taken in it and are still held."""
    before = set(_held)
    try:
        yield
    finally:
        for path in [path for path in _held if path not in before]:
            _held[path].count = 1
            _held[path].release()


def clear(folder: Path) -> None:
    """Remove the files that ended writers of `folder` left behind. Nothing is removed from a
    running writer, or from a folder that is read-only."""
    with suppress(OSError):
        left = [path for path in folder.iterdir() if is_writer_file(path.name)]
        if left:
            with _alone_here(folder):
                for path in left:
                    found = read(path)
                    if found is not None and found.gone():
                        _put_away(path, found)


@contextmanager
def turn(folder: Path) -> Iterator[None]:
    """Wait until no other thread, in any process, is in such a block for the folder."""
    me, path = Writer.this(), folder.resolve() / _TURN_FILE
    while take(path, me) is not None:
        time.sleep(_TURN_SECONDS)
    held = _held[path] = Hold(path, me.token, made=False)
    _start_beating()
    try:
        yield
    finally:
        held.release()


def beside(out: Path) -> tuple[Path, str]:
    """The place that is held for a folder that is replaced as a whole: its parent, and the file's
    name."""
    return out.parent, f".{out.name}{WRITER_FILE}"


def is_writer_file(name: str) -> bool:
    """Whether a file of this name belongs to this module."""
    return name == _TURN_FILE or _NAME.fullmatch(name) is not None


def _take_in_launch(own: Path, me: Writer) -> Writer | None:
    """Like `take`, but waits for a rank of the same launch on another machine, which was lost and
    which this process replaces, until that rank counts as gone."""
    deadline = time.monotonic() + SILENT_SECONDS + _PATIENCE_SECONDS
    while (found := take(own, me)) is not None:
        lost = found.of_one_launch(me) and not found.is_here
        if not lost or time.monotonic() > deadline:
            return found
        time.sleep(_LOOK_SECONDS)
    return None


def _file_of(file: str, rank: str) -> str:
    return f"{file.removesuffix('.json')}-{rank}.json"


def _require_alone(folder: Path, place: Path, file: str, me: Writer) -> None:
    """Raise `UserError` while processes of another launch, whose main process is gone, still
    write."""
    for path in place.glob(_file_of(file, "*")):
        found = read(path)
        if found is None or found.of_one_launch(me):
            continue
        if not found.gone():
            raise _refusal(folder, found)
        path.unlink(missing_ok=True)


def _refusal(folder: Path, found: Writer) -> UserError:
    wait = (
        "Wait for it or end it"
        if found.is_here
        else f"Wait for it or end it (once silent for {SILENT_SECONDS:.0f} s it counts as gone)"
    )
    return UserError(
        f"another process writes to '{folder}': {found}. {wait}, or choose another folder "
        "(run.name, run.drafter, or the stage's own)."
    )


# Signs of life


@cache
def _start_beating() -> None:
    """Touch this process's files until it ends, then remove them."""
    threading.Thread(target=_beat, name="writer", daemon=True).start()
    atexit.register(_give_all_up)


os.register_at_fork(after_in_child=_start_beating.cache_clear)


def _beat() -> None:
    while True:
        time.sleep(BEAT_SECONDS)
        for each in list(_held.values()):
            found = read(each.path)
            if found is not None and found.token == each.token:
                with suppress(OSError):
                    os.utime(each.path)
            elif found is not None and _held.get(each.path) is each:
                del _held[each.path]
                logger.error(
                    "this process gave no sign of life for too long and %s took over '%s': end "
                    "this one",
                    found,
                    each.path.parent,
                )


def _give_all_up() -> None:
    for each in list(_held.values()):
        each.count = 1
        each.release()


# Processes


def _launch() -> str:
    """The launcher's description of this launch; empty without a launcher and for a single
    process."""
    if int(os.environ.get("WORLD_SIZE") or 1) < 2:
        return ""
    names = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE")
    return " ".join(os.environ.get(name, "") for name in names)


def _stat(pid: int) -> list[str]:
    """The fields of /proc/<pid>/stat after the command's name: state, parent, ...; empty where
    there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return text.rpartition(")")[2].split()


def _ticks(pid: int) -> int:
    found: list[Any] = _stat(pid)
    return int(found[19]) if len(found) > 19 else 0


def _runs(pid: int, ticks: int) -> bool:
    """Whether exactly this process runs. Its id may have been given to another process since, and a
    killed process keeps its id until its parent has collected it."""
    if pid <= 0 or not alive(pid):
        return False
    found = _stat(pid)
    return not found or (found[0] not in "ZX" and (not ticks or _ticks(pid) == ticks))
