"""What a training records: the facts that are stored with every state, and its manifest.

docs/formats.md describes the fields. Settings are those of the configuration classes, as JSON
values.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NotRequired

from typing_extensions import TypedDict

from inference.manifest import FileEntry, read_manifest_as

Settings = dict[str, object]
"""The fields of one configuration class."""


class TargetFacts(TypedDict):
    """What identifies a target."""

    revision: str
    tokenizer_hash: str


class RunFacts(TypedDict):
    """The facts that identify a training; they are compared when it continues. data: SHA-256 of the
    answers' manifest; base: SHA-256 of the weights that it starts from, which are those of an
    adapter's base."""

    kind: str
    head: Settings
    target: TargetFacts
    engine: Settings
    precision: str
    data: str
    optim: Settings
    schedule: Settings
    train: Settings
    joint: NotRequired[Settings]
    base: NotRequired[str]


class DataFacts(TypedDict):
    """The answers that were trained on, and the files of prompts that tau was measured on."""

    path: str
    manifest_sha256: str
    domains: NotRequired[list[str]]
    """The domains that were trained on; missing if all were."""
    validation: NotRequired[list[str]]


class BestFacts(TypedDict):
    """The best evaluation; tau is None if it was not measured."""

    step: int
    tau: float | None
    tau_ci95: list[float] | None


class TrainSettings(TypedDict):
    """The settings that a manifest repeats."""

    engine: Settings
    optim: Settings
    schedule: Settings
    train: Settings


class JointFacts(TypedDict):
    """Joint training: its settings, the original target, the folder of the new one, and the
    drift."""

    settings: Settings
    original: dict[str, object]
    target: str
    drift: Mapping[str, object]


class AdapterFacts(TypedDict):
    """An adapter: its base's folder and the SHA-256 of the weights there, rank and alpha."""

    base: str
    base_sha256: str
    rank: int
    alpha: float


class TrainOutcome(TypedDict):
    """The content of a training's manifest. Paths are relative to the manifest's folder."""

    kind: str
    head: Settings
    target: dict[str, object]
    data: DataFacts
    checkpoint: str
    files: NotRequired[list[FileEntry]]
    """The checkpoint's configuration and weights; earlier versions did not list them."""
    best: BestFacts
    steps: int
    ended_by: str
    tokens: int
    seconds: float
    processes: int
    history: str
    summary: str
    settings: TrainSettings
    joint: NotRequired[JointFacts]
    adapter: NotRequired[AdapterFacts]


class TrainManifest(TrainOutcome):
    """The manifest of a finished training."""

    format: int
    stage: str
    provenance: NotRequired[dict[str, object]]


def read_training(folder: Path) -> TrainManifest:
    """The manifest of a finished training; raises `UserError` if there is none."""
    return read_manifest_as(TrainManifest, folder, "train")
