"""Weights & Biases. The run belongs to the folder: its id is written there before the run starts,
so that the same command continues the same run however early it was killed."""

from __future__ import annotations

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


class WeightsAndBiases:
    """A run at Weights & Biases, or its files below <out>/wandb. identity: the run's id."""

    def __init__(
        self,
        out: Path,
        names: RunNames,
        settings: Mapping[str, Any],
        identity: str,
        *,
        online: bool,
    ) -> None:
        try:
            import wandb
        except ImportError as error:
            raise missing("wandb", "wandb", "", "disabled") from error
        self._wandb, self._names = wandb, names
        self.failures: tuple[type[Exception], ...] = (wandb.errors.Error, OSError)
        quiet = {"silent": True, "console": "off", "disable_git": True, "save_code": False}
        try:
            self._run = wandb.init(
                project=names.project,
                name=names.name or None,
                group=names.group or None,
                job_type=names.job_type or None,
                dir=str(out),
                mode="online" if online else "offline",
                config=dict(settings),
                tags=list(names.tags) or None,
                id=identity,
                resume="allow",
                settings=wandb.Settings(**quiet),
            )
        except wandb.errors.Error as error:
            raise UserError(
                f"Weights & Biases could not start: {error}. "
                "Use train.tracker.wandb=offline or disabled."
            ) from error
        self._run.define_metric("tau", summary="max")

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        self._run.log(dict(figures), step=step)

    def summarise(self, step: int, best: Mapping[str, float]) -> None:
        self._run.summary.update(dict(best))

    def show(self, step: int, transcripts: Sequence[Transcript]) -> None:
        table = self._wandb.Table(columns=list(COLUMNS), data=rows(transcripts))
        self._run.log({TRANSCRIPTS: table}, step=step)

    def keep(self, checkpoint: Path) -> None:
        artifact = self._wandb.Artifact(self._names.artifact, type=ARTIFACT_TYPE)
        artifact.add_dir(str(checkpoint))
        self._run.log_artifact(artifact)

    def close(self) -> None:
        self._run.finish()
