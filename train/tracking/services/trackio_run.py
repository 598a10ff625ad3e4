"""Trackio: a dashboard on this machine (`trackio show`), or on a Hugging Face Space that
TRACKIO_SPACE_ID names. Trackio's own variables set the place of its files and its servers."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from heads.api.errors import UserError
from train.tracking.services.base import (
    ARTIFACT_TYPE,
    COLUMNS,
    TRANSCRIPTS,
    RunNames,
    Transcript,
    missing,
    rows,
)


class TrackioRun:
    """A run of a Trackio project. It has no summary: the best tau is a separate figure."""

    failures: tuple[type[Exception], ...] = (OSError, ValueError, RuntimeError)

    def __init__(self, names: RunNames, settings: Mapping[str, Any], *, resumed: bool) -> None:
        try:
            import trackio
        except ImportError as error:
            raise missing("trackio", "trackio", "trackio", "false") from error
        self._trackio, self._names = trackio, names
        labels = {"job_type": names.job_type, "tags": list(names.tags)}
        try:
            with contextlib.redirect_stdout(io.StringIO()):  # it prints how to show the dashboard
                self._run = trackio.init(
                    names.project,
                    name=names.name or None,
                    group=names.group or None,
                    config={**settings, **labels},
                    resume="allow" if resumed else "never",
                    embed=False,
                    auto_log_gpu=False,
                    auto_log_cpu=False,
                )
        except self.failures as error:
            raise UserError(
                f"Trackio could not start: {error}. Check TRACKIO_SPACE_ID and TRACKIO_SERVER_URL, "
                "or use train.tracker.trackio=false."
            ) from error

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        self._run.log(dict(figures), step=step)

    def summarise(self, step: int, best: Mapping[str, float]) -> None:
        self._run.log(dict(best), step=step)

    def show(self, step: int, transcripts: Sequence[Transcript]) -> None:
        table = self._trackio.Table(columns=list(COLUMNS), data=rows(transcripts))
        self._run.log({TRANSCRIPTS: table}, step=step)

    def keep(self, checkpoint: Path) -> None:
        self._run.log_artifact(checkpoint, name=self._names.artifact, type=ARTIFACT_TYPE)

    def close(self) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            self._trackio.finish()
