"""Reads the rows of any dataset in order, from any position, without an index and in little memory.

Shuffling works on blocks of `buffer` rows: block n is read whole and permuted by the seed and n
alone. A position is the start of the block and the number of its rows that were taken, so a
continued reading repeats no row and skips none. Positions are JSON values: `input/state.json`
stores them.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow.parquet import ParquetFile

from heads.api.errors import UserError
from heads.api.reading import reason
from train.data import tables
from train.data.config import SourceConfig
from train.data.permute import stable_permutation

PARQUET_ROWS = 1024
"""Rows that are decoded together."""
BUFFER_BYTES = 1 << 20
"""Bytes of a column that are read at a time, so that a large row group is not held as a whole."""
COLUMN_PROBE = 21


NumberedRow = tuple[int, tables.RawRow | tables.BadRowError]
"""A row's number in the dataset, and the row or the error that makes it unusable."""
Place = dict[str, Any]
"""A position, as JSON values that only the same kind of reader can use."""


class TableRows:
    """The rows of a table with random access, in a given order. A place: the number of rows
    read."""

    def __init__(self, table: tables.Table, numbers: Any) -> None:
        self.table, self.numbers = table, numbers
        self.columns = list(table.column_names)
        self._next = 0

    def read(self, place: Place | None) -> Iterator[NumberedRow]:
        """(number, row or what is wrong with it) from a place on."""
        for at in range(place["next"] if place else 0, len(self.numbers)):
            self._next, number = at + 1, int(self.numbers[at])
            yield number, self.table[number]

    def place(self) -> Place:
        """Where the last row that `read` gave ends."""
        return {"next": self._next}


class LineStream:
    """The lines of .jsonl or .txt files, read in order; `at`: file, byte in it, number of the next
    row."""

    def __init__(self, files: list[Path]) -> None:
        self.files = files
        self.at: Place = {"file": 0, "byte": 0, "number": 0}

    def __iter__(self) -> Iterator[NumberedRow]:
        for number in range(self.at["file"], len(self.files)):
            with self.files[number].open("rb") as file:
                file.seek(self.at["byte"])
                parse = tables.parser_of(self.files[number])
                for line in iter(file.readline, b""):
                    if line.strip():
                        row = self.at["number"]
                        self.at = {"file": number, "byte": file.tell(), "number": row + 1}
                        yield row, parse(line)
            self.at = {"file": number + 1, "byte": 0, "number": self.at["number"]}


class ParquetStream:
    """The rows of .parquet files; `at`: file, row group, row in it, number of the next row. It does
    not use `datasets`, whose scanner decodes a file as far ahead of its reader as it can."""

    def __init__(self, files: list[Path], shown: str) -> None:
        self.files, self.shown = files, shown
        self.at: Place = {"file": 0, "group": 0, "row": 0, "number": 0}

    def __iter__(self) -> Iterator[NumberedRow]:
        try:
            while (number := self.at["file"]) < len(self.files):
                given = {"pre_buffer": False, "buffer_size": BUFFER_BYTES}
                with ParquetFile(self.files[number], **given) as file:
                    yield from self._rows(file)
                self.at = {**self.at, "file": number + 1, "group": 0, "row": 0}
        except pa.ArrowInvalid as error:
            raise UserError(
                f"dataset '{self.shown}' cannot be read: {error}. Check the file."
            ) from error

    def _rows(self, file: ParquetFile) -> Iterator[NumberedRow]:
        while self.at["group"] < file.num_row_groups:
            first, place = self.at["row"], 0
            for batch in file.iter_batches(PARQUET_ROWS, row_groups=[self.at["group"]]):
                skipped = min(max(0, first - place), batch.num_rows)
                place += skipped
                for row in batch.slice(skipped).to_pylist():
                    place, number = place + 1, self.at["number"]
                    self.at = {**self.at, "row": place, "number": number + 1}
                    yield number, row
            self.at = {**self.at, "group": self.at["group"] + 1, "row": 0}


class DatasetStream:
    """A `datasets.IterableDataset`; `at`: its own state, number of the next row. Raises `UserError`
    for files that `datasets` cannot parse."""

    def __init__(self, dataset: Any, shown: str) -> None:
        self.dataset, self.shown, self.number = dataset, shown, 0

    @property
    def at(self) -> Place:
        return {"state": self.dataset.state_dict(), "number": self.number}

    @at.setter
    def at(self, place: Place) -> None:
        self.dataset.load_state_dict(place["state"])
        self.number = place["number"]

    def __iter__(self) -> Iterator[NumberedRow]:
        try:
            for row in self.dataset:
                self.number += 1
                yield self.number - 1, row
        except ValueError as error:  # also of pyarrow
            raise UserError(
                f"dataset '{self.shown}' cannot be read: {reason(error)}. Check the file, or turn "
                "it into jsonl to skip broken rows."
            ) from error


Stream = LineStream | ParquetStream | DatasetStream


class StreamedRows:
    """The rows of a stream, in order or shuffled block by block. A place: block, rows taken of it,
    where it begins. Raises `UserError` if the dataset cannot be opened or breaks off."""

    def __init__(self, source: SourceConfig) -> None:
        self.source = source
        self._open = partial(open_stream, source, tables.local_files(source.path))
        self._at: Place = {"block": 0, "taken": 0, "stream": None}
        self._live: Stream | None = None
        self.columns = tables.names_in(row for _, row in islice(self._open(), COLUMN_PROBE))

    def read(self, place: Place | None) -> Iterator[NumberedRow]:
        """(number, row or what is wrong with it) from a place on."""
        stream, shuffle = self._open(), self.source.shuffle
        block, taken = (place["block"], place["taken"]) if place else (0, 0)
        if place and place["stream"] is not None:
            stream.at = place["stream"]
        rows = iter(stream)
        while True:
            start = stream.at if shuffle else None
            held = self._block(rows)
            if not held:
                return
            order = stable_permutation(len(held), self.source.seed, block) if shuffle else [0]
            for used in range(taken, len(held)):
                if shuffle:
                    self._at = {"block": block, "taken": used + 1, "stream": start}
                else:  # a dataset's own state is costly: it is taken only when `place` is called
                    self._at, self._live = {"block": block + 1, "taken": 0, "stream": None}, stream
                yield held[int(order[used])]
            block, taken = block + 1, 0

    def place(self) -> Place:
        """Where the last row that `read` gave ends."""
        return self._at if self._live is None else {**self._at, "stream": self._live.at}

    def _block(self, rows: Iterator[NumberedRow]) -> list[NumberedRow]:
        try:
            return list(islice(rows, self.source.buffer if self.source.shuffle else 1))
        except OSError as error:
            raise UserError(
                f"dataset '{self.source.path}' broke off ({error}). The same command continues "
                "where it stopped."
            ) from error


def open_stream(source: SourceConfig, files: list[Path] | Path | None) -> Stream:
    """The rows of a source in order; files: its `local_files`."""
    kinds = {file.suffix for file in files} if isinstance(files, list) else set()
    if isinstance(files, list) and kinds in ({tables.LINES}, {tables.PROMPTS}):
        return LineStream(files)
    if isinstance(files, list) and kinds == {".parquet"}:
        return ParquetStream(files, source.path)
    return DatasetStream(tables.open_dataset(source, files, streaming=True), source.path)
