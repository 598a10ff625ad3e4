"""Packs documents of token ids into rows of one length, best fit first, so that little is padding.

Documents stay flat on disk beside their answers (`packed_file.py`), or in memory when they come
from there; a row is put together when it is asked for. Everything is deterministic: the same shards
and sequence length give the same rows.

Legend: R rows, T positions (sequence_length), D documents.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray
from torch import Tensor

from heads.api.errors import UserError
from heads.api.target_info import TargetInfo
from inference.manifest import MANIFEST_FILE, file_sha256, verify_file
from inference.target.chat import Span
from train.data.answers import PACKED, SHARD_SCHEMA, Watch, ignore
from train.data.manifest import read_answers
from train.data.masks import require_supervised
from train.data.packed_file import (
    EXTRAS,
    WINDOW_DOCUMENTS,
    WINDOW_TOKENS,
    Counts,
    Document,
    Flat,
    Indexes,
    PackKey,
    is_whole,
    pack_in_memory,
    read_packed,
    write_packed,
)

logger = logging.getLogger(__name__)

BATCH_ROWS = 1024
"""Rows of a shard that are read together."""


@dataclass(frozen=True)
class PackReport:
    """What packing did. padding_share: of R * T positions; supervised_share: of real tokens."""

    documents: int
    truncated: int
    dropped: int
    rows: int
    tokens: int
    padding_share: float
    supervised_share: float

    def __str__(self) -> str:
        return (
            f"packed {self.documents} documents ({self.tokens} tokens) into {self.rows} rows: "
            f"{self.padding_share:.1%} padding, {self.supervised_share:.1%} of the tokens "
            f"supervised; {self.truncated} documents cut to the sequence length, {self.dropped} "
            "dropped because they have no answer"
        )


@dataclass(frozen=True)
class RowArrays:
    """One row: tokens [T] int32 (0 on padding), positions [T] int32 (restarting with each
    document), segments [T] int32 (1, 2, ... per document, 0 on padding), loss_mask [T] bool;
    weights and anchors [T] float32 (1 on padding), None where the answers have none."""

    tokens: NDArray[np.int32]
    positions: NDArray[np.int32]
    segments: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    weights: NDArray[np.float32] | None = None
    anchors: NDArray[np.float32] | None = None


class PackedData:
    """Documents packed into R rows of T positions. `len(data)` is R; `row(i)` builds one;
    `supervised` [R] counts its mask."""

    _temporary: tempfile.TemporaryDirectory[str] | None = None

    def __init__(
        self, documents: Iterable[Document], sequence_length: int, extras: Sequence[str] = ()
    ) -> None:
        _check_length(sequence_length)
        self._open(sequence_length, *pack_in_memory(documents, sequence_length, extras))

    @classmethod
    def from_manifest(
        cls, directory: Path, info: TargetInfo, sequence_length: int, watch: Watch = ignore
    ) -> PackedData:
        """Pack the answers that `headstart generate` wrote to `directory`; rows are kept beside
        them, in `packed/`, for the next training (where that folder cannot be written: in a
        temporary one).

        Raises `UserError` when the stage is unfinished, a shard was changed, the answers were
        tokenised for another vocabulary than that of `info`, or nothing is supervised.
        """
        _check_length(sequence_length)
        shards = checked_shards(directory, info)
        key: PackKey = {
            "answers": file_sha256(directory / MANIFEST_FILE),
            "sequence_length": sequence_length,
            "vocab_size": info.vocab_size,
            "windows": [WINDOW_DOCUMENTS, WINDOW_TOKENS],
        }
        extras = extras_of(shards)
        if extras:
            key["extras"] = extras
        name = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]
        folder = directory / PACKED / name
        if is_whole(folder, key) and not is_whole(folder, key, thorough=True):
            logger.warning("the packed rows in '%s' were damaged; they are built again", folder)
            shutil.rmtree(folder, ignore_errors=True)
        data = cls.__new__(cls)
        if not is_whole(folder, key):
            try:
                write_packed(
                    folder,
                    weighted_documents(shards, info, watch, extras),
                    sequence_length,
                    key,
                    extras,
                )
            except OSError as error:
                logger.warning(
                    "packed rows cannot be kept in '%s' (%s); a temporary folder is used",
                    folder,
                    error,
                )
                data._temporary = tempfile.TemporaryDirectory(prefix="headstart-packed-")
                folder = Path(data._temporary.name) / name
                write_packed(
                    folder,
                    weighted_documents(shards, info, extras=extras),
                    sequence_length,
                    key,
                    extras,
                )
        data._open(sequence_length, *read_packed(folder))
        return data

    def _open(self, sequence_length: int, counts: Counts, indexes: Indexes, flat: Flat) -> None:
        require_supervised(counts.supervised, counts.tokens)
        self.sequence_length = sequence_length
        self._indexes, self._flat = indexes, flat
        self.extras = [name for name in EXTRAS if name in flat]
        self.supervised: NDArray[np.int64] = indexes.supervised
        self.report = PackReport(
            documents=counts.documents,
            truncated=counts.truncated,
            dropped=counts.dropped,
            rows=counts.rows,
            tokens=counts.tokens,
            padding_share=1 - counts.tokens / (counts.rows * sequence_length),
            supervised_share=counts.supervised / counts.tokens,
        )

    def __len__(self) -> int:
        return len(self.supervised)

    def row(self, index: int) -> RowArrays:
        """Row `index` as arrays of T entries."""
        at = self._indexes
        begin, end = int(at.starts[index]), int(at.starts[index + 1])
        stored = self._flat["tokens"].read(begin, end)
        lengths = at.lengths[at.documents[index] : at.documents[index + 1]]
        tokens, positions, segments = (
            np.zeros(self.sequence_length, dtype=np.int32) for _ in range(3)
        )
        loss_mask = np.zeros(self.sequence_length, dtype=bool)
        used = len(stored)
        loss_mask[:used] = stored < 0
        tokens[:used] = np.where(stored < 0, ~stored, stored)
        begins = np.repeat(np.cumsum(lengths) - lengths, lengths)
        positions[:used] = np.arange(used) - begins
        segments[:used] = np.repeat(np.arange(1, len(lengths) + 1), lengths)
        beside = {}
        for name in self.extras:
            beside[name] = np.ones(self.sequence_length, dtype=np.float32)
            beside[name][:used] = self._flat[name].read(begin, end)
        return RowArrays(tokens, positions, segments, loss_mask, **beside)


def _check_length(sequence_length: int) -> None:
    if sequence_length < 2:
        raise UserError(f"the sequence length must be at least 2; given: {sequence_length}.")


def read_documents(
    directory: Path, info: TargetInfo
) -> Iterator[tuple[NDArray[np.int32], list[Span]]]:
    """Documents (tokens, answer spans) of a finished generate stage, checked, in shard order."""
    yield from documents_of(checked_shards(directory, info), info)


def checked_shards(directory: Path, info: TargetInfo) -> list[Path]:
    """The unchanged shards of answers for `info`'s vocabulary; raises `UserError` otherwise."""
    manifest = read_answers(directory)
    _require_target(directory, manifest.get("target"), info)
    if not manifest.get("shards"):
        raise UserError(
            f"the manifest in '{directory}' lists no shards. Delete the folder and run `headstart "
            "generate` again."
        )
    return [verify_file(directory, entry) for entry in manifest["shards"]]


def documents_of(
    shards: Iterable[Path], info: TargetInfo, watch: Watch = ignore
) -> Iterator[tuple[NDArray[np.int32], list[Span]]]:
    """Documents of shards, in order. A row may hold several: see `StoredAnswer.parts`."""
    for tokens, spans, _ in weighted_documents(shards, info, watch):
        yield tokens, spans


def extras_of(shards: Sequence[Path]) -> list[str]:
    """Which of `EXTRAS` the shards have; raises `UserError` unless all have the same."""
    found = [[name for name in EXTRAS if name in pq.read_schema(path).names] for path in shards]
    if any(names != found[0] for names in found):
        raise UserError(
            f"the shards beside '{shards[0]}' differ in their columns {list(EXTRAS)}. Run "
            "`headstart feedback` again."
        )
    return found[0]


def weighted_documents(
    shards: Iterable[Path], info: TargetInfo, watch: Watch = ignore, extras: Sequence[str] = ()
) -> Iterator[tuple[NDArray[np.int32], list[Span], dict[str, NDArray[np.float32]]]]:
    """`documents_of` with the columns `extras` per token; `UserError` for invalid weights."""
    rows = 0
    for path in shards:
        for batch in _batches(path, extras):
            rows += len(batch)
            tokens, spans = batch.column("tokens"), batch.column("spans").to_pylist()
            parts = (
                batch.column("parts").to_pylist()
                if "parts" in batch.schema.names
                else [None] * len(spans)
            )
            values, bounds = tokens.values.to_numpy(), tokens.offsets.to_numpy()
            if len(values) and not 0 <= values.min() <= values.max() < info.vocab_size:
                raise UserError(
                    f"'{path}' holds token ids outside 0..{info.vocab_size - 1}, the vocabulary "
                    f"of target '{info.id}'."
                )
            beside = {name: _weights(path, name, batch.column(name), tokens) for name in extras}
            for number, answer in enumerate(spans):
                whole = values[bounds[number] : bounds[number + 1]]
                own = {
                    name: column[bounds[number] : bounds[number + 1]]
                    for name, column in beside.items()
                }
                for part, (low, high) in _split(
                    whole, [(start, end) for start, end in answer], parts[number] or ()
                ):
                    yield *part, {name: column[low:high] for name, column in own.items()}
            watch("pack", rows)


def _split(
    tokens: NDArray[np.int32], spans: list[Span], parts: Sequence[int]
) -> Iterator[tuple[tuple[NDArray[np.int32], list[Span]], Span]]:
    """The documents of one row and where they lie; `parts`: where later ones begin."""
    for begin, end in pairwise([0, *parts, len(tokens)]):
        inside = [(low - begin, high - begin) for low, high in spans if begin <= low < end]
        yield (tokens[begin:end], inside), (begin, end)


def _weights(
    path: Path, name: str, column: pa.ListArray, tokens: pa.ListArray
) -> NDArray[np.float32]:
    """A column of weights, flat like the tokens' values."""
    values: NDArray[np.float32] = column.values.to_numpy()
    if not np.array_equal(column.offsets.to_numpy(), tokens.offsets.to_numpy()):
        raise UserError(
            f"'{path}' has not one entry of '{name}' per token. Run `headstart feedback` again."
        )
    if not (np.isfinite(values).all() and (values >= 0).all()):
        raise UserError(
            f"'{path}' holds {name} that are below 0 or no numbers. Run `headstart feedback` again."
        )
    return values


def _batches(path: Path, extras: Sequence[str] = ()) -> Iterator[pa.RecordBatch]:
    try:
        file = pq.ParquetFile(path)
    except pa.ArrowInvalid as error:
        raise UserError(f"'{path}' is not a shard of `headstart generate`: {error}") from error
    for name in ("tokens", "spans"):
        if (
            name not in file.schema_arrow.names
            or file.schema_arrow.field(name).type != SHARD_SCHEMA.field(name).type
        ):
            raise UserError(
                f"'{path}' is not a shard of `headstart generate`: it has no column '{name}' of "
                "token numbers."
            )
    # Shards of older versions have no column `parts`: one document per row.
    columns = [
        name for name in ("tokens", "spans", "parts", *extras) if name in file.schema_arrow.names
    ]
    yield from file.iter_batches(batch_size=BATCH_ROWS, columns=columns)


def _require_target(directory: Path, stored: Any, info: TargetInfo) -> None:
    if not isinstance(stored, Mapping):
        raise UserError(
            f"the manifest in '{directory}' does not say which target wrote the answers. Run "
            "`headstart generate` again."
        )
    if stored.get("tokenizer_hash") != info.tokenizer_hash:
        raise UserError(
            f"the answers in '{directory}' were tokenised for target '{stored.get('id')}', whose "
            f"tokenizer differs from that of '{info.id}'. Generate answers with '{info.id}', or "
            "train for the target that wrote these."
        )
    if stored.get("revision") != info.revision:
        logger.warning(
            "the answers in '%s' are from another revision of the target (%s)",
            directory,
            stored.get("revision"),
        )


PARITY_TOKENS = 48


def token_counts(data: PackedData, vocab_size: int) -> Tensor:
    """How often each token occurs in the supervised parts of the data: [V] int64."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for index in range(len(data)):
        row = data.row(index)
        counts += np.bincount(row.tokens[row.loss_mask], minlength=vocab_size)
    return torch.from_numpy(counts)


def parity_documents(data: PackedData, least: int) -> Iterator[list[int]]:
    """Documents of at least `least` tokens, cut to a length at which the check is quick."""
    for index in range(len(data)):
        row = data.row(index)
        for segment in range(1, int(row.segments.max()) + 1):
            tokens = row.tokens[row.segments == segment]
            if len(tokens) >= least:
                yield tokens[: max(least, PARITY_TOKENS)].tolist()
