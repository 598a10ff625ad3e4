"""The learner's view of an engine that serves exported drafters, such as vLLM. The engine keeps its
drafter while it runs: an accepted candidate is exported, and loaded when the engine is restarted.

    <folder>/engine.json       the drafter that was exported last, its export and command; until
                               then, the drafter that was given
    <folder>/exports/0003/     an export; earlier ones are kept, since an engine may be restarted
                               with them
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from heads.api.errors import UserError
from heads.api.reading import read_object
from inference.manifest import write_json
from inference.server.trial import TrialState

STATE_FILE, EXPORTS = "engine.json", "exports"
Export = Callable[[Path, Path], str]
"""(checkpoint, folder to write) -> the command that serves it."""


class ExportingServer:
    """A `train.learning.server.Server` without trials. drafter: the checkpoint whose export the
    engine serves until learning exports one; export: raises `UserError` for a drafter that the
    engine cannot load."""

    tries = False

    def __init__(self, folder: Path, drafter: Path, export: Export) -> None:
        self.folder, self.export = folder, export
        self._state = folder / STATE_FILE
        if not self._state.is_file() or not self._known()["export"]:
            write_json(self._state, {"drafter": str(drafter.resolve()), "export": ""})

    def current(self) -> str:
        return self._known()["drafter"]

    def install(self, checkpoint: Path) -> None:
        """Export a drafter, and record it as the one that serves."""
        out = self.folder / EXPORTS / checkpoint.name
        command = self.export(checkpoint, out)
        state = {"drafter": str(checkpoint.resolve()), "export": str(out), "command": command}
        write_json(self._state, state)

    def describe(self) -> dict[str, str]:
        """The folder of the export, and the command that serves it."""
        return {name: self._known()[name] for name in ("export", "command")}

    def _known(self) -> dict[str, str]:
        known = read_object(self._state, "Delete it to begin with learn.drafter again.")
        return {name: str(known.get(name, "")) for name in ("drafter", "export", "command")}

    def start_trial(self, checkpoint: Path, share: float) -> None:
        raise UserError("an engine tries no candidates; they are compared on held-out traffic.")

    def trial(self) -> TrialState | None:
        return None

    def end_trial(self, keep: bool) -> None:
        """There is none."""
