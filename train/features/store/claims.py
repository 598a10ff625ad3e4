"""Claims, with which several writers share one store: each names in a file the shard that it is
writing, and others take another.

A claim without a sign of life is taken over (`inference.writers`). Claims only avoid duplicate
work: two writers of one shard (a machine that was thought gone comes back) write the same bytes,
whole, under the same name.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from heads.api.errors import UserError
from heads.api.system_errors import explained
from inference.manifest import STALE_SECONDS
from inference.writers import Writer, drop, read, take


class Claims:
    """The claims of one store, including this object's own."""

    def __init__(self, folder: Path) -> None:
        self.store, self.folder = folder, folder / "claims"
        self._own: dict[str, str] = {}

    def path(self, name: str) -> Path:
        return self.folder / f"{name}.json"

    def take(self, name: str) -> bool:
        """Claim `name`; returns False if a living writer has it. Raises `UserError` for a refused
        write."""
        own = Writer.this()
        try:
            if take(self.path(name), own, STALE_SECONDS) is not None:
                return False
        except OSError as error:
            raise disk_error(self.store, error) from error
        self._own[name] = own.token
        return True

    def renew(self, name: str) -> None:
        with contextlib.suppress(OSError):
            os.utime(self.path(name))

    def drop(self, name: str) -> None:
        """Give up one of this object's claims, unless another writer has taken it over."""
        token = self._own.pop(name, None)
        if token is not None:
            drop(self.path(name), token)

    def clear(self) -> None:
        """Remove claims of writers that are gone: those killed after they had completed a shard."""
        for path in sorted(self.folder.glob("*.json")):
            with contextlib.suppress(UserError):  # no process waits for a completed shard
                if self.take(path.stem):
                    self.drop(path.stem)

    def all(self) -> dict[str, Writer]:
        """The claims of writers that are not known to be gone."""
        names = sorted(path.stem for path in self.folder.glob("*.json"))
        found = {name: read(self.path(name)) for name in names}
        return {
            name: writer
            for name, writer in found.items()
            if writer is not None and not writer.gone(STALE_SECONDS)
        }


def disk_error(folder: Path, error: Exception) -> UserError:
    return UserError(
        f"the feature store in '{folder}' cannot be written: {explained(error)} What was "
        "written is kept, and the same command continues."
    )
