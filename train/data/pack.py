"""Packs documents of token ids into rows of one length, best fit first, so that little is padding.

Documents stay flat in memory (int32 ids, one mask); a row is put together when it is asked for. Everything is
deterministic: the same shards and sequence length give the same rows.

Legend: R rows, T positions (sequence_length), D documents.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from heads.api.errors import UserError
from heads.api.target_info import TargetInfo
from inference.chat import Span
from inference.manifest import read_manifest, verify_file
from train.data.answers import SHARD_SCHEMA
from train.data.masks import Tokens, mask_of, require_supervised

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PackReport:
    """What packing did. padding_share: of all R * T positions; supervised_share: of all tokens that are not
    padding."""

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
            f"{self.padding_share:.1%} padding, "
            f"{self.supervised_share:.1%} of the tokens supervised; {self.truncated} documents cut to the "
            "sequence length, "
            f"{self.dropped} dropped because they have no answer"
        )


@dataclass(frozen=True)
class RowArrays:
    """One row: tokens [T] int32 (0 on padding), positions [T] int32 (restarting with each document), segments
    [T] int32 (1, 2, ... per document, 0 on padding), loss_mask [T] bool."""

    tokens: NDArray[np.int32]
    positions: NDArray[np.int32]
    segments: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]


class PackedData:
    """Documents packed into R rows of T positions. `len(data)` is R; `row(i)` builds one; `supervised` [R]
    counts its mask."""

    def __init__(self, documents: Iterable[tuple[Tokens, Sequence[Span]]], sequence_length: int) -> None:
        if sequence_length < 2:
            raise UserError(f"the sequence length must be at least 2; given: {sequence_length}.")
        self.sequence_length = sequence_length
        kept, truncated, dropped = _windows(documents, sequence_length)
        require_supervised(sum(int(mask.sum()) for _, mask in kept), sum(len(tokens) for tokens, _ in kept))
        lengths = [len(tokens) for tokens, _ in kept]
        self._bounds = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        self._tokens = np.concatenate([tokens for tokens, _ in kept])
        self._mask = np.concatenate([mask for _, mask in kept])
        self._rows = best_fit(lengths, sequence_length)
        per_document = [int(mask.sum()) for _, mask in kept]
        self.supervised: NDArray[np.int64] = np.array(
            [sum(per_document[d] for d in row) for row in self._rows], dtype=np.int64
        )
        tokens_total = len(self._tokens)
        self.report = PackReport(
            documents=len(kept),
            truncated=truncated,
            dropped=dropped,
            rows=len(self._rows),
            tokens=tokens_total,
            padding_share=1 - tokens_total / (len(self._rows) * sequence_length),
            supervised_share=int(self.supervised.sum()) / tokens_total,
        )

    @classmethod
    def from_manifest(cls, directory: Path, info: TargetInfo, sequence_length: int) -> PackedData:
        """Pack the answers that `headstart generate` wrote to `directory`.

        Raises `UserError` when the stage is unfinished, a shard was changed, the answers were tokenised for
        another vocabulary than that of `info`, or nothing is supervised.
        """
        return cls(read_documents(directory, info), sequence_length)

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, index: int) -> RowArrays:
        """Row `index` as arrays of T entries."""
        length = self.sequence_length
        tokens, positions, segments = (np.zeros(length, dtype=np.int32) for _ in range(3))
        loss_mask = np.zeros(length, dtype=bool)
        begin = 0
        for segment, document in enumerate(self._rows[index], 1):
            source = slice(self._bounds[document], self._bounds[document + 1])
            count = int(source.stop - source.start)
            place = slice(begin, begin + count)
            tokens[place] = self._tokens[source]
            positions[place] = np.arange(count)
            segments[place] = segment
            loss_mask[place] = self._mask[source]
            begin += count
        return RowArrays(tokens, positions, segments, loss_mask)


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Best-fit decreasing bin packing: document numbers per row, every row's lengths summing to at most
    `capacity`.

    Each document, longest first, goes into the fullest row that still has room for it. Open rows are kept by
    free space, and a bit set of the spaces in use finds the smallest that is large enough.
    """
    rows: list[list[int]] = []
    by_space: list[list[int]] = [[] for _ in range(capacity + 1)]
    in_use = 0
    for document in sorted(range(len(lengths)), key=lambda number: (-lengths[number], number)):
        length = lengths[document]
        fitting = in_use >> length
        if fitting:
            space = (fitting & -fitting).bit_length() - 1 + length
            row = by_space[space].pop()
            if not by_space[space]:
                in_use &= ~(1 << space)
        else:
            space, row = capacity, len(rows)
            rows.append([])
        rows[row].append(document)
        by_space[space - length].append(row)
        in_use |= 1 << (space - length)
    return rows


def read_documents(directory: Path, info: TargetInfo) -> Iterator[tuple[NDArray[np.int32], list[Span]]]:
    """Documents (tokens, answer spans) of a finished generate stage, in shard order, after the checks of
    `from_manifest`."""
    manifest = read_manifest(directory, "generate")
    _require_target(directory, manifest.get("target"), info)
    if not manifest.get("shards"):
        raise UserError(
            f"the manifest in '{directory}' lists no shards. Delete the folder and run `headstart generate` "
            "again."
        )
    for path in [verify_file(directory, entry) for entry in manifest["shards"]]:
        for batch in _batches(path):
            tokens, spans = batch.column("tokens"), batch.column("spans").to_pylist()
            values, bounds = tokens.values.to_numpy(), tokens.offsets.to_numpy()
            if len(values) and not 0 <= values.min() <= values.max() < info.vocab_size:
                raise UserError(
                    f"'{path}' holds token ids outside 0..{info.vocab_size - 1}, the vocabulary of target "
                    f"'{info.id}'."
                )
            for number, answer in enumerate(spans):
                yield values[bounds[number] : bounds[number + 1]], [(start, end) for start, end in answer]


def _batches(path: Path) -> Iterator[pa.RecordBatch]:
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
                f"'{path}' is not a shard of `headstart generate`: it has no column '{name}' of token "
                "numbers."
            )
    yield from file.iter_batches(columns=["tokens", "spans"])


def _require_target(directory: Path, stored: Any, info: TargetInfo) -> None:
    if not isinstance(stored, Mapping):
        raise UserError(
            f"the manifest in '{directory}' does not say which target wrote the answers. Run `headstart "
            "generate` again."
        )
    if stored.get("tokenizer_hash") != info.tokenizer_hash:
        raise UserError(
            f"the answers in '{directory}' were tokenised for target '{stored.get('id')}', whose tokenizer "
            "differs from that of "
            f"'{info.id}'. Generate answers with '{info.id}', or train for the target that wrote these."
        )
    if stored.get("revision") != info.revision:
        logger.warning(
            "the answers in '%s' are from another revision of the target (%s)",
            directory,
            stored.get("revision"),
        )


def _windows(
    documents: Iterable[tuple[Tokens, Sequence[Span]]], length: int
) -> tuple[list[tuple[NDArray[np.int32], NDArray[np.bool_]]], int, int]:
    """(tokens, mask) of every document cut to `length`; how many were cut; how many had nothing supervised
    and were dropped."""
    kept, truncated, dropped = [], 0, 0
    for tokens, spans in documents:
        mask = mask_of(spans, len(tokens))
        if not mask.any():
            dropped += 1
            continue
        begin = _window_start(mask, length)
        truncated += len(tokens) > length
        window = np.array(tokens[begin : begin + length], dtype=np.int32)
        kept.append((window, mask_of(_shift(spans, begin, len(window)), len(window))))
    return kept, truncated, dropped


def _window_start(mask: NDArray[np.bool_], length: int) -> int:
    """Start of the window of `length` tokens to keep: the document's beginning when an answer reaches into
    it.

    Otherwise half of the window is the context right before the first answer and half is the answer (more
    when the answer ends earlier), so that at least one token is supervised.
    """
    first = int(mask.argmax())
    if first < length:
        return 0
    return min(first + (length + 1) // 2, len(mask)) - length


def _shift(spans: Sequence[Span], begin: int, length: int) -> list[Span]:
    """Spans relative to a window of `length` tokens from `begin`, without what lies outside."""
    moved = ((max(0, start - begin), min(length, end - begin)) for start, end in spans)
    return [(start, end) for start, end in moved if start < end]
