"""The settings of a generation (`generate.*`), and the job that a process works on."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from accelerate import PartialState

from heads.api.config import NonNegativeInt, PositiveInt, Seconds, config
from inference.decoding.config import DecodeConfig
from inference.target.loading import TargetConfig
from inference.verifications import RecordsConfig
from train.data.answers import Watch, ignore
from train.data.config import DataConfig
from train.generate.turns import Backend


@config("generate")
@dataclass(frozen=True)
class GenerateConfig:
    """The source of the answers, and how they are written."""

    answers: Literal["sample", "dataset"] = "sample"
    """sample: the target answers. dataset: keep the dataset's own assistant turns (or spans) and
    only tokenise them."""
    drafter: str | None = None
    """Checkpoint folder of a drafter for this target, to speed decoding up; None: plain decoding.
    At temperature 0, and with sampling.rule=match, the answers are the same. Above temperature 0,
    rejection, block, specinfer and traversal keep their distribution; typical changes it."""
    shard_rows: PositiveInt = 4096
    """Maximum number of answers in one shard of the final output."""
    window_rows: PositiveInt = 8192
    """Rows that are rendered, ordered by length and answered together, per process; memory grows
    with it."""
    flush_rows: PositiveInt = 256
    """Finished answers that are written together; if the process is killed, at most these are lost,
    and they are generated again."""
    flush_seconds: Seconds = 30.0
    """Longest time, in seconds, that a finished answer waits to be written (checked as answers
    finish)."""
    overwrite: bool = False
    """Replace the output of a different configuration in the folder instead of refusing. Output of
    the same configuration is still continued."""
    round: NonNegativeInt = 0
    """How often rejected drafts were fed back before these answers; only noted in the manifest."""
    records: RecordsConfig = field(default_factory=RecordsConfig)
    """Write to <out>/records/ what the drafter drafts and where it fails. Recording ends when its
    files reach the limit."""


@dataclass(frozen=True)
class GenerateJob:
    """The requested generation, and this process's place among the others."""

    config: GenerateConfig
    data: DataConfig
    decode: DecodeConfig
    target: TargetConfig
    out: Path
    state: PartialState
    backend: Backend | None = None
    watch: Watch = ignore
