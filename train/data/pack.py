"""Packs documents of token ids into rows of one length, best fit first, so that little is padding.

Documents stay flat on disk next to their answers (`packed_file.py`), or in memory if they come from
there; a row is assembled when it is read. Everything is deterministic: the same shards and sequence
length give the same rows.

Legend: R rows, T positions (sequence_length), D documents.
"""

from __future__ import annotations

import hashlib
import json
import logging
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray
from torch import Tensor

from heads.api.errors import UserError, suggest
from heads.api.target_info import TargetInfo
from inference.folders import discard
from inference.manifest import MANIFEST_FILE, file_sha256, verify_file
from inference.target.chat import Span
from train.data import packed_file
from train.data.answers import PACKED, SHARD_SCHEMA, read_answers
from train.data.masks import require_supervised
from train.data.packed_file import Document
from train.data.parquet import readable

logger = logging.getLogger(__name__)

BATCH_ROWS = 1024
"""Rows of a shard that are read together."""
PARITY_TOKENS = 48


@dataclass
class PackReport(packed_file.Counts):
    """The result of packing into rows of T positions."""

    sequence_length: int = 0

    @property
    def padding_share(self) -> float:
        """Share of all R * T positions."""
        return 1 - self.tokens / (self.rows * self.sequence_length)

    @property
    def supervised_share(self) -> float:
        """Share of all tokens that are not padding."""
        return self.supervised / self.tokens

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
    weights and anchors [T] float32 (1 on padding), None where there are none."""

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

    domains: tuple[str, ...] = ()
    """The domains of its documents, sorted by name; empty: all that the answers have."""

    def __init__(self, documents: Iterable[Document], sequence_length: int) -> None:
        _check_length(sequence_length)
        self._open(sequence_length, packed_file.pack_in_memory(documents, sequence_length))

    @classmethod
    def from_manifest(
        cls,
        directory: Path,
        info: TargetInfo,
        sequence_length: int,
        domains: Sequence[str] = (),
        context_weight: float = 0.0,
    ) -> PackedData:
        """Pack the answers in `directory`, of some domains (empty: all); rows are kept next to them
        in `packed/` (or in a temporary folder). context_weight: weight of the loss at tokens
        outside answers, which above 0 are supervised too, except for the first of a document.
        Raises `UserError` if the stage is unfinished, a shard was changed, the vocabulary is not
        that of `info`, there are no answers of a domain, nothing is supervised, documents exceed
        the target's positions, or context_weight is above 0 and the answers are those of a
        replay."""
        _check_length(sequence_length)
        if context_weight > 0 and read_answers(directory).get("replay"):
            raise UserError(
                f"train.context_weight={context_weight:g} supervises all tokens of the answers in "
                f"'{directory}', of which feedback.replay=true keeps only those near a drafter's "
                "errors. Set one of the two off."
            )
        shards = checked_shards(directory, info)
        chosen = tuple(sorted(set(domains)))
        require_domains(shards, chosen)
        key: packed_file.PackKey = {
            "answers": file_sha256(directory / MANIFEST_FILE),
            "sequence_length": sequence_length,
            "vocab_size": info.vocab_size,
            "windows": [packed_file.WINDOW_DOCUMENTS, packed_file.WINDOW_TOKENS],
        }
        extras = extras_of(shards)
        if extras:
            key["extras"] = extras
        if chosen:
            key["domains"] = list(chosen)

        def write(folder: Path) -> None:
            documents = weighted_documents(shards, info, extras, chosen)
            packed_file.write_packed(folder, documents, key)

        name = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]
        folder = directory / PACKED / name
        data = cls.__new__(cls)
        data.domains = chosen
        if not packed_file.is_whole(folder, key, thorough=True):
            if packed_file.is_whole(folder, key):
                logger.warning("the packed rows in '%s' were damaged; they are built again", folder)
                with suppress(OSError):
                    discard(folder)
            try:
                write(folder)
            except OSError as error:
                message = "packed rows cannot be kept in '%s' (%s); a temporary folder is used"
                logger.warning(message, folder, error)
                data._temporary = tempfile.TemporaryDirectory(prefix="headstart-packed-")
                folder = Path(data._temporary.name) / name
                write(folder)
        data._open(sequence_length, packed_file.read_packed(folder), context_weight)
        _require_positions(directory, info, int(data._indexes["lengths"].max()))
        return data

    def _open(
        self, sequence_length: int, packed: packed_file.Packed, context_weight: float = 0.0
    ) -> None:
        counts, self._indexes, self._flat = packed
        require_supervised(counts.supervised, counts.tokens)
        self.context_weight = context_weight
        if context_weight > 0:
            at = self._indexes
            supervised = np.diff(at["starts"]) - np.diff(at["documents"])
            self._indexes = {**at, "supervised": supervised}
            counts.supervised = int(supervised.sum())
        self.sequence_length = sequence_length
        self.extras = [name for name in packed_file.EXTRAS if name in self._flat]
        self.weighed = bool(self.extras) or 0 < context_weight < 1
        self.supervised = self._indexes["supervised"]
        self.report = PackReport(**vars(counts), sequence_length=sequence_length)

    def __len__(self) -> int:
        return len(self.supervised)

    def row(self, index: int) -> RowArrays:
        """Row `index` as arrays of T entries."""
        at, length = self._indexes, self.sequence_length
        begin, end = at["starts"][index : index + 2].tolist()
        stored = self._flat["tokens"].read(begin, end)
        lengths = at["lengths"][slice(*at["documents"][index : index + 2])]
        tokens, positions, segments = np.zeros((3, length), dtype=np.int32)
        loss_mask = np.zeros(length, dtype=bool)
        used = len(stored)
        loss_mask[:used] = stored < 0
        tokens[:used] = np.where(stored < 0, ~stored, stored)
        begins = np.repeat(np.cumsum(lengths) - lengths, lengths)
        positions[:used] = np.arange(used) - begins
        segments[:used] = np.repeat(np.arange(1, len(lengths) + 1), lengths)
        beside = {}
        for name in self.extras:
            beside[name] = np.ones(length, dtype=np.float32)
            beside[name][:used] = self._flat[name].read(begin, end)
        if self.context_weight > 0:
            context = ~loss_mask
            context[used:] = False
            loss_mask[:used] = positions[:used] > 0
            if self.weighed:
                weights = beside.setdefault("weights", np.ones(length, dtype=np.float32))
                weights[context] = self.context_weight
        return RowArrays(tokens, positions, segments, loss_mask, **beside)

    def answers(self, index: int) -> NDArray[np.int32]:
        """The tokens of row `index` that are within answers, whatever else is supervised."""
        begin, end = self._indexes["starts"][index : index + 2].tolist()
        stored = self._flat["tokens"].read(begin, end)
        return ~stored[stored < 0]


def _check_length(sequence_length: int) -> None:
    if sequence_length < 2:
        raise UserError(f"the sequence length must be at least 2; given: {sequence_length}.")


def _require_positions(directory: Path, info: TargetInfo, longest: int) -> None:
    if longest > info.max_position_embeddings:
        raise UserError(
            f"the answers in '{directory}' have documents of up to {longest} tokens, of which the "
            f"target '{info.id}' reads at most {info.max_position_embeddings} "
            "(max_position_embeddings). Set train.sequence_length to that, or generate the answers "
            "again, which leaves such documents out or cuts them (data.truncate)."
        )


def read_documents(
    directory: Path, info: TargetInfo, domains: Sequence[str] = ()
) -> Iterator[tuple[NDArray[np.int32], list[Span]]]:
    """Documents (tokens, answer spans) of a finished generate stage, checked, in shard order.
    domains: leaves out others; empty: all."""
    shards = checked_shards(directory, info)
    for tokens, spans, _ in weighted_documents(shards, info, domains=domains):
        yield tokens, spans


def require_domains(shards: Sequence[Path], domains: Sequence[str]) -> None:
    """Raise `UserError` for a domain of which the shards hold no answer."""
    known: set[str] = set()
    for path in shards if domains else ():
        with readable(path):
            if "domain" in pq.read_schema(path).names:
                known |= set(pq.read_table(path, columns=["domain"]).column("domain").to_pylist())
    for domain in domains:
        if domain not in known:
            raise UserError(
                f"train.domains: there are no answers of domain '{domain}' in '{shards[0]}' and "
                f"the shards beside it.{suggest(domain, known)}"
            )


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


def extras_of(shards: Sequence[Path]) -> list[str]:
    """Which of `EXTRAS` the shards have; raises `UserError` unless all have the same."""
    known = list(packed_file.EXTRAS)
    found = [[name for name in known if name in pq.read_schema(path).names] for path in shards]
    if any(names != found[0] for names in found):
        raise UserError(
            f"the shards beside '{shards[0]}' differ in their columns {known}. Run "
            "`headstart feedback` again."
        )
    return found[0]


def weighted_documents(
    shards: Iterable[Path],
    info: TargetInfo,
    extras: Sequence[str] = (),
    domains: Sequence[str] = (),
) -> Iterator[tuple[NDArray[np.int32], list[Span], dict[str, NDArray[np.float32]]]]:
    """`read_documents` with the columns `extras` per token; `UserError` for invalid weights."""
    for path in shards:
        for batch in _batches(path, extras, domains):
            tokens, spans = batch.column("tokens"), batch.column("spans").to_pylist()
            # Shards of older versions have no column `parts`: one document per row.
            known = "parts" in batch.schema.names
            parts = batch.column("parts").to_pylist() if known else [None] * len(spans)
            values, bounds = tokens.values.to_numpy(), tokens.offsets.to_pylist()
            if len(values) and not 0 <= values.min() <= values.max() < info.vocab_size:
                raise UserError(
                    f"'{path}' holds token ids outside 0..{info.vocab_size - 1}, the vocabulary "
                    f"of target '{info.id}'."
                )
            beside = {name: _weights(path, name, batch.column(name), tokens) for name in extras}
            for (first, last), answer, later in zip(pairwise(bounds), spans, parts, strict=True):
                for low, high in pairwise([first, *(first + at for at in later or ()), last]):
                    begin, end = low - first, high - first
                    inside = [(a - begin, b - begin) for a, b in answer if begin <= a < end]
                    weights = {name: column[low:high] for name, column in beside.items()}
                    yield values[low:high], inside, weights


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


def _batches(path: Path, extras: Sequence[str], domains: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """The rows of a shard, of some domains (empty: all), `BATCH_ROWS` and less at a time."""
    with readable(path), pq.ParquetFile(path) as file:
        yield from _columns(path, file, extras, domains)


def _columns(
    path: Path, file: pq.ParquetFile, extras: Sequence[str], domains: Sequence[str]
) -> Iterator[pa.RecordBatch]:
    """`_batches` of an open shard."""
    schema = file.schema_arrow
    for name in ("tokens", "spans"):
        if name not in schema.names or schema.field(name).type != SHARD_SCHEMA.field(name).type:
            raise UserError(
                f"'{path}' is not a shard of `headstart generate`: it has no column '{name}' of "
                "token numbers."
            )
    wanted = ("tokens", "spans", "parts", *extras, *(("domain",) if domains else ()))
    columns = [name for name in wanted if name in schema.names]
    for batch in file.iter_batches(batch_size=BATCH_ROWS, columns=columns):
        if domains and "domain" in columns:
            batch = batch.filter(pc.is_in(batch.column("domain"), pa.array(list(domains))))
        yield batch


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
        message = "the answers in '%s' are from another revision of the target (%s)"
        logger.warning(message, directory, stored.get("revision"))


def token_counts(data: PackedData, vocab_size: int) -> Tensor:
    """How often each token occurs in the answers of the data: [V] int64. Tokens outside answers,
    which `context_weight` supervises too, do not count: no draft is made of them."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for index in range(len(data)):
        counts += np.bincount(data.answers(index), minlength=vocab_size)
    return torch.from_numpy(counts)


def parity_documents(data: PackedData, least: int) -> Iterator[list[int]]:
    """Documents of at least `least` tokens, cut to a length for which the check is quick."""
    for index in range(len(data)):
        row = data.row(index)
        for segment in range(1, int(row.segments.max()) + 1):
            tokens = row.tokens[row.segments == segment]
            if len(tokens) >= least:
                yield tokens[: max(least, PARITY_TOKENS)].tolist()
