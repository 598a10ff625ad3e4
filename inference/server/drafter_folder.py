"""A folder that a server watches: its drafter is the newest checkpoint in the folder.

Training writes a checkpoint's config.json last, and a finished folder can be renamed into place; a
checkpoint that appears in one of these ways is complete once it has a config.json. A checkpoint may
also be copied file by file, so the server loads one only if it has not changed for a whole
interval. It tries a refused checkpoint again when the checkpoint changes.
"""

from __future__ import annotations

import logging
import threading
from contextlib import suppress
from pathlib import Path

from heads.api.checkpoint import CONFIG_FILE, weights_file
from heads.api.errors import UserError
from inference.manifest import MANIFEST_FILE, PARTIAL
from inference.server.swapping import DrafterSwaps

logger = logging.getLogger(__name__)
LOOK_SECONDS = 2.0

Seen = tuple[Path, tuple[tuple[int, int], ...]]
"""A checkpoint, with modification time in nanoseconds and size of each of its files."""


class DrafterFolder:
    """See the module. A checkpoint is a folder in `folder`, or the `best` of a training's folder
    there."""

    def __init__(self, swaps: DrafterSwaps, folder: Path) -> None:
        if not folder.is_dir():
            raise UserError(
                f"serve.watch_folder '{folder}' is not a folder. Make it, or leave the setting out."
            )
        self.swaps, self.folder = swaps, folder
        self._last: Seen | None = None
        self._done: Seen | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="headstart-drafters", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(10.0)

    def _work(self) -> None:
        while not self._stop.wait(LOOK_SECONDS):
            try:
                self.look()
            except OSError as error:  # the folder is not available now
                logger.warning("'%s' cannot be looked at: %s", self.folder, error.strerror)
            except Exception:  # of one checkpoint: later ones are still looked at
                logger.exception("a checkpoint of '%s' is not taken", self.folder)

    def look(self) -> None:
        """Install the newest checkpoint if it is a different one and has not changed since the
        last look. Nothing is installed while a trial runs."""
        newest = newest_checkpoint(self.folder)
        settled, self._last = newest == self._last, newest
        if newest is None or not settled or newest == self._done:
            return
        if self.swaps.trial() is not None:
            return
        self._done = newest
        try:
            self.swaps.install(newest[0])
        except UserError:  # which was logged
            if self.swaps.trial() is not None:  # it began meanwhile; try again after it
                self._done = None


def newest_checkpoint(folder: Path) -> Seen | None:
    """The checkpoint whose configuration was written last, or None."""
    found = []
    for child in folder.iterdir():
        if child.name.startswith(".") or child.name.endswith(PARTIAL):
            continue
        best = child / "best"
        checkpoint = best if (best / CONFIG_FILE).is_file() else child
        with suppress(OSError):  # a file, or a folder that is being removed
            written = (checkpoint / CONFIG_FILE).stat().st_mtime_ns
            found.append((written, checkpoint))
    if not found:
        return None
    checkpoint = max(found)[1]
    files = checkpoint / CONFIG_FILE, weights_file(checkpoint), checkpoint / MANIFEST_FILE
    marks = []
    for file in (*files, checkpoint.parent / MANIFEST_FILE):
        with suppress(OSError):
            now = file.stat()
            marks.append((now.st_mtime_ns, now.st_size))
    return checkpoint, tuple(marks)
