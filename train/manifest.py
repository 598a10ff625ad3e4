"""What a training writes of itself: the facts that are stored with every state, and its manifest.

docs/formats.md describes the fields. Settings are those of the configuration classes, as JSON
values.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NotRequired, TypedDict, cast

from inference.manifest import read_manifest

Settings = dict[str, object]
"""The fields of one configuration class."""


class RunFacts(TypedDict):
    """What a training is: compared when it continues. data: SHA-256 of the answers' manifest."""

    kind: str
    head: Settings
    target: Settings
    engine: Settings
    precision: str
    data: str
    optim: Settings
    schedule: Settings
    train: Settings
    joint: NotRequired[Settings]


class TrainOutcome(TypedDict):
    """What a training says in its manifest. Paths are relative to the manifest's folder."""

    kind: str
    head: Settings
    target: dict[str, object]
    data: dict[str, str]
    """Folder of the answers, SHA-256 of their manifest."""
    checkpoint: str
    best: dict[str, Any]
    """Step, tau and tau_ci95 of the best evaluation; tau is None where it was not measured."""
    steps: int
    ended_by: str
    tokens: int
    seconds: float
    processes: int
    history: str
    summary: str
    settings: dict[str, Settings]
    joint: NotRequired[dict[str, Any]]
    """Settings, original target, folder of the new one, drift."""


class TrainManifest(TrainOutcome):
    """The manifest of a finished training."""

    format: int
    stage: str
    provenance: NotRequired[dict[str, object]]


def read_training(folder: Path) -> TrainManifest:
    """The manifest of a finished training; raises `UserError` where there is none."""
    return cast(TrainManifest, read_manifest(folder, "train"))
