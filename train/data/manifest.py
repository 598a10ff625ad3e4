"""The manifest of a folder of answers, as `headstart generate` and `headstart feedback` write it.

docs/formats.md describes the fields. Those that versions before did not write are `NotRequired`.
"""

from __future__ import annotations

from pathlib import Path
from typing import NotRequired, TypedDict, cast

from inference.manifest import FileEntry, read_manifest
from train.data.ingest import InputReport


class RecordsReport(TypedDict):
    """Records of verifications: their folder, rows of both tables, answers without a record."""

    folder: str
    verifications: int
    sequences: int
    missing: int


class AnswersManifest(TypedDict):
    """A finished folder of answers. `data` has the settings of the sources, `sampling` those of the
    decoder; `truncated` counts rows and tokens, `reasons` the rows that have no answer."""

    format: int
    stage: str
    round: NotRequired[int]
    target: dict[str, object]
    sampling: NotRequired[dict[str, object]]
    data: NotRequired[dict[str, object]]
    input: NotRequired[InputReport]
    counts: dict[str, int]
    truncated: NotRequired[dict[str, int]]
    reasons: NotRequired[dict[str, int]]
    shards: list[FileEntry]
    failures: NotRequired[FileEntry]
    records: NotRequired[RecordsReport]
    provenance: NotRequired[dict[str, object]]


def read_answers(folder: Path) -> AnswersManifest:
    """The manifest of a folder of answers; raises `UserError` where there is none."""
    return cast(AnswersManifest, read_manifest(folder, "generate"))
