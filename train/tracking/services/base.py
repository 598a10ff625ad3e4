"""The interface of tracking services: figures by step, the best tau, transcripts, a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Protocol

from heads.api.errors import UserError

TRANSCRIPTS = "transcripts"
"""Name of the table of answers."""
ARTIFACT_TYPE = "model"


@dataclass(frozen=True)
class RunNames:
    """The names that identify a run. artifact: name of its checkpoint."""

    project: str
    name: str
    group: str
    job_type: str
    tags: tuple[str, ...]

    @property
    def artifact(self) -> str:
        """The name, with only the characters that services allow in names of artifacts."""
        return "".join(char if char.isalnum() or char in "-_." else "-" for char in self.name)


@dataclass(frozen=True)
class Transcript:
    """An answer of a measurement: texts of prompt and answer, new tokens, committed tokens per
    verify pass."""

    prompt: str
    answer: str
    tokens: int
    tau: float


COLUMNS = tuple(item.name for item in fields(Transcript))


def rows(transcripts: Sequence[Transcript]) -> list[list[Any]]:
    """A table's rows, in the order of `COLUMNS`."""
    return [[getattr(item, name) for name in COLUMNS] for item in transcripts]


class Service(Protocol):
    """One started service. `failures` are the errors of its library and of the connection: if a
    service raises one, the training continues without it."""

    failures: tuple[type[Exception], ...]

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """Figures of a step."""

    def summarise(self, step: int, best: Mapping[str, float]) -> None:
        """The best measurement so far; replaces an earlier one."""

    def show(self, step: int, transcripts: Sequence[Transcript]) -> None:
        """Answers of the best measurement so far."""

    def keep(self, checkpoint: Path) -> None:
        """The best checkpoint's folder, when the training is complete."""

    def close(self) -> None:
        """The training has ended or was stopped."""


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted names and values of nested settings."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def missing(setting: str, package: str, extra: str, off: str) -> UserError:
    """The refusal of a service whose library is not installed. extra: the extra that has it; empty:
    Headstart itself requires it."""
    whole = (
        f"with its extra `{extra}`: pip install -e '.[{extra}]'"
        if extra
        else "anew: pip install -e ."
    )
    return UserError(
        f"train.tracker.{setting} is on, but {package} is not installed. Install it with `pip "
        f"install {package}` (or Headstart {whole} in a clone), or set "
        f"train.tracker.{setting}={off}."
    )
