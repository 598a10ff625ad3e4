"""What a run writes while it trains: `log.jsonl`, Weights & Biases and TensorBoard if asked for.

One line is one JSON object with its `step`. A saved state remembers the log's length; when a run
continues from it, what was written later is cut off first, so that nothing is there twice.
TensorBoard's event files can only grow, so a new one is made from the log at every start.

The Weights & Biases run belongs to the folder: its id is written there before the run starts, so
that the same command continues the same run however early it was killed.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Required, TypedDict, cast

from heads.api.config import config
from heads.api.errors import UserError
from inference.manifest import write_bytes

LOG_FILE = "log.jsonl"
ID_FILE = "wandb-id.txt"
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
    """Supervised tokens up to and with this step."""
    padding: float | None
    tokens_per_second: float | None
    seconds: float
    cost: dict[str, float]
    """Seconds by part since the line before, mfu, peak_memory (bytes), joules."""
    tau: float
    tau_ci95: tuple[float, float]
    best: bool
    """Whether this tau was the best until then."""


@config("train.tracking.tracker")
@dataclass(frozen=True)
class TrackerConfig:
    """Where figures go besides log.jsonl, which is always written."""

    wandb: Literal["disabled", "offline", "online"] = "offline"
    """disabled, offline (files below <out>/wandb, for `wandb sync`) or online (needs a login)."""
    project: str = "headstart"
    """Weights & Biases project."""
    name: str = ""
    """Name of the run there; empty: the kind of drafter."""
    tags: tuple[str, ...] = ()
    """Tags of the run there."""
    tensorboard: bool = False
    """Also write <out>/tensorboard: `tensorboard --logdir <out>` shows it (extra `tracking`)."""


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
        """length: bytes of the log that belong to what is continued; settings: for Weights &
        Biases."""
        self._file: Any = None
        self._wandb: Any = None
        self._events: EventFile | None = None
        if not active:
            return
        out.mkdir(parents=True, exist_ok=True)
        path = out / LOG_FILE
        self._file = path.open("ab")
        if path.stat().st_size > length:
            self._file.truncate(length)
        if config.tensorboard:
            self._events = EventFile(out / TENSORBOARD, read_log(path))
        if config.wandb != "disabled":
            self._start_wandb(config, out, settings)

    def _start_wandb(self, config: TrackerConfig, out: Path, settings: Settings) -> None:
        try:
            import wandb
        except ImportError as error:
            raise UserError(
                "train.tracker.wandb is on, but wandb is not installed. Install it, or set "
                "train.tracker.wandb=disabled."
            ) from error
        identity = out / ID_FILE
        if not identity.is_file():
            write_bytes(identity, f"{secrets.token_hex(4)}\n".encode())
        quiet = {"silent": True, "console": "off", "disable_git": True, "save_code": False}
        try:
            self._wandb = wandb.init(
                project=config.project,
                name=config.name or str(settings.get("kind", "")) or None,
                dir=str(out),
                mode="online" if config.wandb == "online" else "offline",
                config=without_secrets(settings),
                tags=list(config.tags) or None,
                id=identity.read_text(encoding="utf-8").strip(),
                resume="allow",
                settings=wandb.Settings(**quiet),
            )
        except wandb.errors.Error as error:
            raise UserError(
                f"Weights & Biases could not start: {error}. "
                "Use train.tracker.wandb=offline or disabled."
            ) from error

    def write(self, step: int, figures: Mapping[str, object]) -> None:
        """Append one line; it is flushed when this returns, not synchronised."""
        if self._file is None:
            return
        finite = {name: _finite(value) for name, value in figures.items()}
        line = cast(LogLine, {"step": step, **finite})
        self._file.write(json.dumps(line, allow_nan=False).encode() + b"\n")
        self._file.flush()
        if self._wandb is not None:
            self._wandb.log(dict(scalars(line)), step=step)
        if self._events is not None:
            self._events.write(line)

    def flush(self) -> int:
        """Force the log onto the disk; returns its length in bytes."""
        if self._file is None:
            return 0
        os.fsync(self._file.fileno())
        return int(self._file.tell())

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        if self._events is not None:
            self._events.close()
        if self._wandb is not None:
            self._wandb.finish()
        self._file = self._events = self._wandb = None

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class EventFile:
    """TensorBoard's event file of a run, replacing those in `folder`. lines: of the log so far."""

    def __init__(self, folder: Path, lines: Iterable[LogLine]) -> None:
        try:
            from tensorboard.compat.proto.event_pb2 import Event
            from tensorboard.compat.proto.summary_pb2 import Summary
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError as error:
            raise UserError(
                "train.tracker.tensorboard is on, but tensorboard is not installed. Install it "
                "with `pip install -e '.[tracking]'`, or set train.tracker.tensorboard=false."
            ) from error
        self._event, self._summary = Event, Summary
        for old in folder.glob("events.out.tfevents.*"):
            old.unlink()
        self._writer = EventFileWriter(str(folder))
        for line in lines:
            self._add(line)
        self._writer.flush()

    def write(self, line: LogLine) -> None:
        self._add(line)
        self._writer.flush()

    def _add(self, line: LogLine) -> None:
        value = self._summary.Value
        values = [value(tag=name, simple_value=number) for name, number in scalars(line)]
        if values:
            given = {"step": line["step"], "summary": self._summary(value=values)}
            self._writer.add_event(self._event(wall_time=time.time(), **given))

    def close(self) -> None:
        self._writer.close()


def scalars(figures: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Names and values of all numbers in a line of the log but `step`; nested as `outer/inner`."""
    for name, value in figures.items():
        if isinstance(value, Mapping):
            yield from scalars(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and (prefix or name != "step"):
            yield prefix + name, float(value)


def read_log(path: Path) -> list[LogLine]:
    """All lines of a log, in order; a last line that a kill left unfinished is left out."""
    whole = path.read_bytes().rpartition(b"\n")[0]
    return [json.loads(line) for line in whole.splitlines()]


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
    """JSON knows no infinity and no not-a-number: None stands for them."""
    if isinstance(value, Mapping):
        return {name: _finite(inner) for name, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
