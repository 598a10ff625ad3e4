"""Several writers, one store: each says in a file which shard it is writing, so that the others take another one.

A claim is a courtesy, not a lock: if two writers ever do the same shard, both write the same bytes, whole, under the same name. A
claim without a sign of life is taken over; its writer's process may be gone, or its machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path

from heads.api.errors import UserError

STALE_SECONDS = 600.0
"""A claim that was not renewed for so long is taken over; a writer of this machine whose process has ended, at once."""


@dataclass(frozen=True)
class Claim:
    """Who says to be writing: host and process, and the seconds since its last sign of life."""

    host: str
    pid: int
    age: float

    @property
    def stale(self) -> bool:
        """Whether the writer seems to be gone."""
        if self.host == socket.gethostname() and not alive(self.pid):
            return True
        return self.age > STALE_SECONDS

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, last sign of life {self.age:.0f} s ago"


class Claims:
    """The claims of one store."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "claims"

    def path(self, name: str) -> Path:
        """The file of the claim on `name`."""
        return self.folder / f"{name}.json"

    def take(self, name: str) -> bool:
        """Claim `name`; False when another writer that is alive has it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        content = json.dumps({"host": socket.gethostname(), "pid": os.getpid()}).encode()
        for _ in range(2):
            try:
                handle = os.open(self.path(name), os.O_CREAT | os.O_EXCL | os.O_WRONLY)
            except FileExistsError:
                found = self.read(name)
                if found is not None and not found.stale:
                    return False
                self.drop(name)
                continue
            with os.fdopen(handle, "wb") as file:
                file.write(content)
            return True
        return False

    def renew(self, name: str) -> None:
        """A sign of life."""
        with contextlib.suppress(OSError):
            os.utime(self.path(name))

    def drop(self, name: str) -> None:
        """Give a claim up."""
        with contextlib.suppress(OSError):
            self.path(name).unlink()

    def read(self, name: str) -> Claim | None:
        """Who holds the claim; None when nobody does, or when it was left half written by a kill long ago."""
        path = self.path(name)
        try:
            age = max(0.0, time.time() - path.stat().st_mtime)
            content = json.loads(path.read_text(encoding="utf-8"))
            return Claim(str(content["host"]), int(content["pid"]), age)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError):
            return Claim("an unknown machine", 0, age) if age < STALE_SECONDS else None

    def all(self) -> dict[str, Claim]:
        """Every claim by name."""
        names = sorted(path.stem for path in self.folder.glob("*.json"))
        return {name: claim for name in names if (claim := self.read(name)) is not None}


def alive(pid: int) -> bool:
    """Whether a process of this machine exists."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def disk_error(folder: Path, error: Exception) -> UserError:
    """The error for a write that the disk refused."""
    return UserError(
        f"the feature store in '{folder}' cannot be written: {error}. What was written is kept: make room, then run the same "
        "command again; it continues."
    )
