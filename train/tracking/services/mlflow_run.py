"""MLflow: a run at MLFLOW_TRACKING_URI, or in MLflow's own default, mlflow.db of the working
directory (`mlflow ui`). The run's id is kept in the training's folder."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from heads.api.errors import UserError
from inference.manifest import write_bytes
from train.tracking.services.base import (
    COLUMNS,
    TRANSCRIPTS,
    RunNames,
    Transcript,
    flatten,
    missing,
    rows,
)

ID_FILE = "mlflow-id.txt"
LONGEST_VALUE = 500
"""Characters of a parameter that every server takes."""


class MlflowRun:
    """A run of the experiment with the project's name. out: the folder that holds the run's id."""

    def __init__(self, out: Path, names: RunNames, settings: Mapping[str, Any]) -> None:
        try:
            from mlflow import MlflowClient
            from mlflow.entities import Metric, Param
            from mlflow.exceptions import MlflowException
        except ImportError as error:
            raise missing("mlflow", "mlflow", "mlflow", "false") from error
        self.failures: tuple[type[Exception], ...] = (MlflowException, OSError)
        self._metric = Metric
        try:
            self._client = MlflowClient()
            self._id, new = self._find_run(out / ID_FILE, names)
            if new:
                shown = [Param(key, str(value)[:LONGEST_VALUE]) for key, value in flatten(settings)]
                self._client.log_batch(self._id, params=shown)
        except (*self.failures, ImportError) as error:
            raise UserError(
                f"MLflow could not start: {error}. Check MLFLOW_TRACKING_URI, or use "
                "train.tracker.mlflow=false."
            ) from error

    def _find_run(self, identity: Path, names: RunNames) -> tuple[str, bool]:
        """The id of this folder's run, and whether it was just created."""
        client = self._client
        if identity.is_file():
            run = identity.read_text(encoding="utf-8").strip()
            client.update_run(run, status="RUNNING")
            return run, False
        experiment = client.get_experiment_by_name(names.project)
        number = experiment.experiment_id if experiment else client.create_experiment(names.project)
        labels = {"group": names.group, "job_type": names.job_type, "tags": ", ".join(names.tags)}
        tags = {key: value for key, value in labels.items() if value}
        run = str(client.create_run(number, run_name=names.name or None, tags=tags).info.run_id)
        write_bytes(identity, f"{run}\n".encode())
        return run, True

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        metrics = [self._metric(name, value, now, step) for name, value in figures.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def summarise(self, step: int, best: Mapping[str, float]) -> None:
        self.write(step, best)

    def show(self, step: int, transcripts: Sequence[Transcript]) -> None:
        # as its own log_table writes it, which needs pandas
        table = {"columns": list(COLUMNS), "data": rows(transcripts)}
        self._client.log_dict(self._id, table, f"{TRANSCRIPTS}.json")

    def keep(self, checkpoint: Path) -> None:
        self._client.log_artifacts(self._id, str(checkpoint), artifact_path="checkpoint")

    def close(self) -> None:
        self._client.set_terminated(self._id)
