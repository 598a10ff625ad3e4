"""Several writers, one store: each names in a file the shard it is writing; others take another.

A claim without a sign of life is taken over. Claims change hands under a lock, so that of many that
find the same dead claim one gets it. A claim is a courtesy all the same: two writers of one shard
(a machine that was thought gone comes back, locks that end at the machine) write the same bytes,
whole, under the same name.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from heads.api.errors import UserError
from heads.api.reading import parse_json, read_object
from inference.manifest import STALE_SECONDS, alive


@dataclass(frozen=True)
class Claim:
    """A writer, and the seconds since its last sign of life."""

    host: str
    pid: int
    age: float

    @property
    def stale(self) -> bool:
        if self.host == socket.gethostname() and not alive(self.pid):
            return True
        return self.age > STALE_SECONDS

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, last sign of life {self.age:.0f} s ago"


class Claims:
    """The claims of one store, and which of them are this object's own."""

    def __init__(self, folder: Path) -> None:
        self.store, self.folder = folder, folder / "claims"
        self._own: dict[str, str] = {}

    def path(self, name: str) -> Path:
        return self.folder / f"{name}.json"

    def take(self, name: str) -> bool:
        """Claim `name`; False when a living writer has it, `UserError` for a refused write."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with folder_lock(self.store):
            if self.path(name).exists():
                found = self.read(name)
                if found is not None and not found.stale:
                    return False
                self.path(name).unlink(missing_ok=True)
            token = secrets.token_hex(8)
            content = {"host": socket.gethostname(), "pid": os.getpid(), "token": token}
            try:
                with self.path(name).open("xb") as file:
                    file.write(json.dumps(content).encode())
            except FileExistsError:
                return False  # a machine beyond the reach of our locks was faster
            except OSError as error:
                # half of a claim would be respected as a living writer's
                self.path(name).unlink(missing_ok=True)
                raise disk_error(self.store, error) from error
            self._own[name] = token
            return True

    def renew(self, name: str) -> None:
        with contextlib.suppress(OSError):
            os.utime(self.path(name))

    def drop(self, name: str) -> None:
        """Give a claim of our own up, unless another writer has taken it over."""
        token = self._own.pop(name, None)
        with contextlib.suppress(OSError, ValueError), folder_lock(self.store):
            content = read_object(self.path(name))
            if token is not None and content.get("token") == token:
                self.path(name).unlink()

    def read(self, name: str) -> Claim | None:
        """Who holds the claim; None for no holder, and for one half written by a kill long ago."""
        path = self.path(name)
        try:
            age = max(0.0, time.time() - path.stat().st_mtime)
            content = parse_json(path.read_bytes(), f"'{path}'")
            return Claim(str(content["host"]), int(content["pid"]), age)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError):
            return Claim("an unknown machine", 0, age) if age < STALE_SECONDS else None

    def all(self) -> dict[str, Claim]:
        names = sorted(path.stem for path in self.folder.glob("*.json"))
        return {name: claim for name in names if (claim := self.read(name)) is not None}


@contextlib.contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Hold the folder alone, waiting for its holder; a process's end releases it."""
    import fcntl

    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def disk_error(folder: Path, error: Exception) -> UserError:
    return UserError(
        f"the feature store in '{folder}' cannot be written: {error}. What was written is kept: "
        "make room, then run the same command again; it continues."
    )
