"""Logging of a run in training: `log.jsonl`, and tracking services if configured.

One line is one JSON object with its `step`. A saved state records the log's length; when a run
continues from it, later lines are cut off first, so that no line is repeated. The services are in
`train.tracking.services`; one that fails during a training is left out from then on.
"""

from __future__ import annotations

import json
import logging
import math
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, Required, TypedDict, cast

from heads.api.config import Count, config
from heads.api.reading import parse_json, read_bytes, require_object
from inference.manifest import write_bytes
from train.tracking.services.base import RunNames, Service, Transcript
from train.tracking.services.mlflow_run import MlflowRun
from train.tracking.services.tensor_board import TensorBoard
from train.tracking.services.trackio_run import TrackioRun
from train.tracking.services.weights_and_biases import WeightsAndBiases

logger = logging.getLogger(__name__)

LOG_FILE = "log.jsonl"
ID_FILE = "wandb-id.txt"
TRACKIO_FILE = "trackio-id.txt"
"""Its presence means that the folder's run has begun; Trackio finds the run by its name."""
TENSORBOARD = "tensorboard"
_SECRET_WORDS = ("key", "token", "secret", "password", "credential")
_PLAIN_WORDS = ("tokens", "tokenizer")
Settings = Mapping[str, object]


class LogLine(TypedDict, total=False):
    """A line of log.jsonl: of a step (it has `loss`) or of a measurement (it has `tau`).

    Both also have metrics by name: the kind's (`accuracy/depth1`) or `acceptance/depthK`. None
    stands for a number that is not finite.
    """

    step: Required[int]
    loss: float | None
    lr: float | None
    grad_norm: float | None
    tokens: int
    """Tokens up to and with this step, without padding."""
    padding: float | None
    tokens_per_second: float | None
    seconds: float
    cost: dict[str, float]
    """Seconds by part since the line before, mfu, peak_memory (bytes), joules."""
    tau: float
    tau_ci95: tuple[float, float]
    best: bool
    """Whether this tau was the best until then."""


@config("train.tracker")
@dataclass(frozen=True)
class TrackerConfig:
    """Trackers of the training's figures besides log.jsonl, which is always written."""

    wandb: Literal["disabled", "offline", "online"] = "offline"
    """Weights & Biases: disabled, offline (files below <out>/wandb, for `wandb sync`) or online
    (needs a login)."""
    tensorboard: bool = False
    """Also write <out>/tensorboard: `tensorboard --logdir <out>` shows it (extra `tracking`)."""
    trackio: bool = False
    """Also log to Trackio: `trackio show` (extra `trackio`). TRACKIO_SPACE_ID logs to a Space."""
    mlflow: bool = False
    """Also log to MLflow, at MLFLOW_TRACKING_URI or MLflow's default (extra `mlflow`)."""
    project: str = "headstart"
    """Project in the tracker; in MLflow, the experiment."""
    name: str = ""
    """Name of the run in the tracker; empty: <run.name>/<drafter>."""
    group: str = ""
    """Group of runs that belong together; empty: run.name."""
    job_type: str = "train"
    """Type of the run, for filters."""
    tags: tuple[str, ...] = ()
    """Tags of the run in the tracker."""
    transcripts: Count = 4
    """Answers of the best measurement of tau that the tracker shows as a table; 0: none."""
    artifact: bool = False
    """Also store the best checkpoint in the tracker when the training is complete."""

    @property
    def on(self) -> bool:
        """Whether any service is configured."""
        return self.wandb != "disabled" or self.tensorboard or self.trackio or self.mlflow


class Tracker:
    """Writes figures of the main process; a context manager. Other processes: `active=False`."""

    def __init__(
        self,
        config: TrackerConfig,
        out: Path,
        *,
        length: int,
        settings: Settings,
        active: bool = True,
    ) -> None:
        """length: bytes of the log that belong to the continued run; settings: of the training, for
        the services. Raises `UserError` for a service that cannot start."""
        self._file: Any = None
        self._services: list[Service] = []
        self._artifact = config.artifact
        if not active:
            return
        out.mkdir(parents=True, exist_ok=True)
        path = out / LOG_FILE
        self._file = path.open("ab")
        if path.stat().st_size > length:
            self._file.truncate(length)
        for start in starters(config, out, without_secrets(settings)):
            self._services.append(start())

    def write(self, step: int, figures: Mapping[str, object]) -> None:
        """Append one line; it is flushed when this returns, not synchronised."""
        if self._file is None:
            return
        finite = {name: _finite(value) for name, value in figures.items()}
        line = cast(LogLine, {"step": step, **finite})
        self._file.write(json.dumps(line, allow_nan=False).encode() + b"\n")
        self._file.flush()
        numbers = dict(scalars(line))
        if numbers:
            self._each(lambda service: service.write(step, numbers))
        if line.get("best") and "tau_ci95" in line:
            low, high = line["tau_ci95"]
            best = {"best/tau": line["tau"], "best/tau_low": low, "best/tau_high": high}
            self._each(lambda service: service.summarise(step, best | {"best/step": float(step)}))

    def show(self, step: int, transcripts: Sequence[Transcript]) -> None:
        """Show the answers of the best measurement so far."""
        if transcripts:
            self._each(lambda service: service.show(step, transcripts))

    def keep(self, checkpoint: Path) -> None:
        """Store the best checkpoint, if configured."""
        if self._artifact:
            self._each(lambda service: service.keep(checkpoint))

    def _each(self, call: Callable[[Service], None]) -> None:
        """Call every service; one that fails is left out from then on."""
        for service in list(self._services):
            try:
                call(service)
            except service.failures as error:
                self._services.remove(service)
                name = type(service).__name__
                logger.warning("%s failed and gets no more figures: %s", name, error)

    def flush(self) -> int:
        """Force the log to disk; returns its length in bytes."""
        if self._file is None:
            return 0
        os.fsync(self._file.fileno())
        return int(self._file.tell())

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._each(lambda service: service.close())
        self._file, self._services = None, []

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def starters(
    config: TrackerConfig, out: Path, settings: Settings
) -> Iterator[Callable[[], Service]]:
    """A function that starts it, for each configured service."""
    name = config.name or str(settings.get("kind", ""))
    names = RunNames(config.project, name, config.group, config.job_type, config.tags)
    if config.tensorboard:
        lines = [(line["step"], dict(scalars(line))) for line in read_log(out / LOG_FILE)]
        yield partial(TensorBoard, out / TENSORBOARD, lines)
    if config.wandb != "disabled":
        identity, _ = own_identity(out / ID_FILE)
        online = config.wandb == "online"
        yield partial(WeightsAndBiases, out, names, settings, identity, online=online)
    if config.trackio:
        _, known = own_identity(out / TRACKIO_FILE)
        yield partial(TrackioRun, names, settings, resumed=known)
    if config.mlflow:
        yield partial(MlflowRun, out, names, settings)


def own_identity(file: Path) -> tuple[str, bool]:
    """The id in `file`, which is written at the first call, and whether it existed before."""
    known = file.is_file()
    if not known:
        write_bytes(file, f"{secrets.token_hex(4)}\n".encode())
    return file.read_text(encoding="utf-8").strip(), known


def scalars(figures: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Names and values of all numbers in a log line except `step`; nested as `outer/inner`."""
    for name, value in figures.items():
        if isinstance(value, Mapping):
            yield from scalars(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and (prefix or name != "step"):
            yield prefix + name, float(value)


def read_log(path: Path) -> list[LogLine]:
    """All lines of a log, in order; a last line that a kill left unfinished is left out."""
    whole = read_bytes(path).rpartition(b"\n")[0]
    lines = [parse_json(line, f"'{path}'") for line in whole.splitlines()]
    return [cast(LogLine, require_object(line, f"'{path}'")) for line in lines]


def without_secrets(settings: Settings) -> dict[str, object]:
    """`settings` without entries named like a key, a password or the like, at any depth."""
    kept: dict[str, object] = {}
    for name, value in settings.items():
        lowered = str(name).lower()
        plain = any(word in lowered for word in _PLAIN_WORDS)
        secret = not plain and any(word in lowered for word in _SECRET_WORDS)
        if isinstance(value, Mapping):
            kept[str(name)] = without_secrets(value)
        elif not secret:
            kept[str(name)] = value
    return kept


def _finite(value: Any) -> Any:
    """Replace infinity and NaN, which JSON does not have, by None."""
    if isinstance(value, Mapping):
        return {name: _finite(inner) for name, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
