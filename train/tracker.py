"""What a run writes down while it trains: `log.jsonl`, and Weights & Biases if asked for.

One line is one JSON object with its `step`. When a run continues from step s, lines beyond s are cut first, so that nothing is
there twice.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from heads.api.errors import UserError, suggest
from inference.manifest import write_bytes

logger = logging.getLogger(__name__)

LOG_FILE = "log.jsonl"
WANDB_MODES = ("disabled", "offline", "online")
_SECRET_WORDS = ("key", "token", "secret", "password", "credential")
_PLAIN_WORDS = ("tokens", "tokenizer")


@dataclass(frozen=True)
class TrackerConfig:
    """Where figures go besides log.jsonl, which is always written."""

    wandb: str = "offline"
    """disabled, offline (files below <out>/wandb, to be synchronised by hand) or online (needs a login)."""
    project: str = "headstart"
    """Weights & Biases project."""
    name: str = ""
    """Name of the run there; empty: the kind of drafter."""

    def __post_init__(self) -> None:
        if self.wandb not in WANDB_MODES:
            raise UserError(f"train.tracker.wandb '{self.wandb}' is unknown.{suggest(self.wandb, WANDB_MODES)}")


class Tracker:
    """Writes figures of the main process. Use as a context manager; other processes get one with `active=False`."""

    def __init__(
        self, config: TrackerConfig, out: Path, *, step: int, settings: Mapping[str, Any], run_id: str = "", active: bool = True
    ) -> None:
        """step: updates already done, later lines are cut. settings: stored with the run, secrets left out.

        run_id: of the Weights & Biases run to continue; `run_id` then holds that of the run in use.
        """
        self.run_id = run_id
        self._file: Any = None
        self._wandb: Any = None
        if not active:
            return
        path = out / LOG_FILE
        cut_log(path, step)
        self._file = path.open("a", encoding="utf-8")
        if config.wandb != "disabled":
            self._start_wandb(config, out, settings)

    def _start_wandb(self, config: TrackerConfig, out: Path, settings: Mapping[str, Any]) -> None:
        try:
            import wandb
        except ImportError as error:
            raise UserError(
                "train.tracker.wandb is on, but wandb is not installed. Install it, or set train.tracker.wandb=disabled."
            ) from error
        try:
            self._wandb = wandb.init(
                project=config.project,
                name=config.name or None,
                dir=str(out),
                mode="online" if config.wandb == "online" else "offline",
                config=without_secrets(settings),
                id=self.run_id or None,
                resume="allow" if self.run_id else None,
                settings=wandb.Settings(silent=True, console="off", disable_git=True, save_code=False),
            )
        except wandb.errors.Error as error:
            raise UserError(f"Weights & Biases could not start: {error}. Use train.tracker.wandb=offline or disabled.") from error
        self.run_id = str(self._wandb.id)

    def write(self, step: int, figures: Mapping[str, Any]) -> None:
        """Append one line; it is on the disk's way when this returns (flushed, not synchronised)."""
        if self._file is None:
            return
        self._file.write(json.dumps({"step": step, **figures}, allow_nan=False) + "\n")
        self._file.flush()
        if self._wandb is not None:
            numbers = {name: value for name, value in figures.items() if isinstance(value, (int, float))}
            self._wandb.log(numbers, step=step)

    def flush(self) -> None:
        """Force the log onto the disk, so that it is never behind a saved state."""
        if self._file is not None:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """End the log; may be called again."""
        if self._file is not None:
            self._file.close()
            self._file = None
        if self._wandb is not None:
            self._wandb.finish(quiet=True)
            self._wandb = None

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def cut_log(path: Path, step: int) -> None:
    """Remove every line of a log that lies beyond `step`, and a last line that a kill left unfinished."""
    if not path.is_file():
        return
    kept = b"".join(line for line, content in _lines(path) if content["step"] <= step)
    if len(kept) != path.stat().st_size:
        write_bytes(path, kept)


def read_log(path: Path) -> list[dict[str, Any]]:
    """All complete lines of a log."""
    return [content for _, content in _lines(path)]


def _lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), 1):
        try:
            content = json.loads(line)
            whole = line.endswith(b"\n") and isinstance(content["step"], int)
        except (ValueError, KeyError, TypeError):
            whole = False
        if not whole:
            logger.warning("'%s', line %d is not a complete log line and is dropped", path, number)
            continue
        yield line, content


def without_secrets(settings: Mapping[str, Any]) -> dict[str, Any]:
    """`settings` without entries whose name says that they hold a key, a password or the like, at any depth."""
    kept: dict[str, Any] = {}
    for name, value in settings.items():
        lowered = str(name).lower()
        secret = any(word in lowered for word in _SECRET_WORDS) and not any(word in lowered for word in _PLAIN_WORDS)
        if isinstance(value, Mapping):
            kept[str(name)] = without_secrets(value)
        elif not secret:
            kept[str(name)] = value
    return kept


def finite(value: float) -> float | None:
    """A number as JSON knows it: None for infinities and for what is not a number."""
    return value if math.isfinite(value) else None
