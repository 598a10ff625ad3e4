"""Reads the rows of any dataset in order, from any position, without an index and in little memory.

Shuffling works on blocks of `buffer` rows: block n is read whole and permuted by the seed and n
alone. A position is then the beginning of the block and how many of its rows were taken, so that
continuing repeats no row and skips none. Positions are JSON values: `input/state.json` stores them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, TypedDict, TypeVar

import pyarrow as pa
from pyarrow.parquet import ParquetFile

from heads.api.errors import UserError
from train.data.permute import stable_permutation
from train.data.tables import LINES, BadRowError, RawRow, Table, local_files, open_stream

PARQUET_ROWS = 1024
"""Rows that are decoded together."""
BUFFER_BYTES = 1 << 20
"""What is read of a column at a time, so that a file of one large row group is not held whole."""


NumberedRow = tuple[int, RawRow | BadRowError]
"""A row's number in the dataset, and the row or what is wrong with it."""


class TablePlace(TypedDict):
    """A position in a table with random access."""

    next: int


class LinePlace(TypedDict):
    """A position in .jsonl files: file, byte in it, number of the next row."""

    file: int
    byte: int
    number: int


class ParquetPlace(TypedDict):
    """A position in .parquet files: file, row group, row in the group, number of the next row."""

    file: int
    group: int
    row: int
    number: int


class DatasetPlace(TypedDict):
    """A position in a `datasets.IterableDataset`: its own state, number of the next row."""

    state: Any
    number: int


class BlockPlace(TypedDict):
    """A position in a stream that is read by blocks: block, rows taken of it, where it begins."""

    block: int
    taken: int
    stream: Any


PlaceT = TypeVar("PlaceT")


class Stream(Protocol[PlaceT]):
    """Rows that can only be read in order. `at`: where the last row that was read ends."""

    @property
    def at(self) -> PlaceT: ...

    def seek(self, place: PlaceT) -> None: ...

    def __iter__(self) -> Iterator[NumberedRow]: ...


class Rows(Protocol[PlaceT]):
    """Numbered rows in reading order. `columns`: their names, as far as they are known."""

    columns: list[str]

    def read(self, place: PlaceT | None) -> Iterator[NumberedRow]:
        """(number, row or what is wrong with it) from a place on."""

    def place(self) -> PlaceT:
        """Where the last row that `read` gave ends."""


class TableRows:
    """The rows of a table with random access, in a given order."""

    def __init__(self, table: Table, numbers: Any) -> None:
        self.table, self.numbers = table, numbers
        self.columns = table.columns
        self._next = 0

    def read(self, place: TablePlace | None) -> Iterator[NumberedRow]:
        for at in range(place["next"] if place else 0, len(self.numbers)):
            self._next = at + 1
            number = int(self.numbers[at])
            try:
                row: RawRow | BadRowError = self.table[number]
            except BadRowError as error:
                row = error
            yield number, row

    def place(self) -> TablePlace:
        return {"next": self._next}


class LineStream:
    """The lines of .jsonl files, read in order; a place is a file, a byte and a row number."""

    def __init__(self, files: list[Path]) -> None:
        self.files = files
        self.at: LinePlace = {"file": 0, "byte": 0, "number": 0}

    def seek(self, place: LinePlace) -> None:
        self.at = place

    def __iter__(self) -> Iterator[NumberedRow]:
        for number in range(self.at["file"], len(self.files)):
            with self.files[number].open("rb") as file:
                file.seek(self.at["byte"] if number == self.at["file"] else 0)
                for line in iter(file.readline, b""):
                    if line.strip():
                        row = self.at["number"]
                        self.at = {"file": number, "byte": file.tell(), "number": row + 1}
                        yield row, _parse(line)
            self.at = {"file": number + 1, "byte": 0, "number": self.at["number"]}


class ParquetStream:
    """The rows of .parquet files, read in order; a place is a file, a row group, a row in it and a
    row number.

    Not through `datasets`: Arrow's scanner, which it uses, decodes a file as far ahead of its
    reader as it gets, up to the whole.
    """

    def __init__(self, files: list[Path], shown: str) -> None:
        self.files, self.shown = files, shown
        self.at: ParquetPlace = {"file": 0, "group": 0, "row": 0, "number": 0}

    def seek(self, place: ParquetPlace) -> None:
        self.at = place

    def __iter__(self) -> Iterator[NumberedRow]:
        try:
            while self.at["file"] < len(self.files):
                with ParquetFile(
                    self.files[self.at["file"]], pre_buffer=False, buffer_size=BUFFER_BYTES
                ) as file:
                    yield from self._rows(file)
                self.at = {
                    "file": self.at["file"] + 1,
                    "group": 0,
                    "row": 0,
                    "number": self.at["number"],
                }
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
    """A `datasets.IterableDataset`; a place is its own state and a row number."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.number = 0

    @property
    def at(self) -> DatasetPlace:
        return {"state": self.dataset.state_dict(), "number": self.number}

    def seek(self, place: DatasetPlace) -> None:
        self.dataset.load_state_dict(place["state"])
        self.number = place["number"]

    def __iter__(self) -> Iterator[NumberedRow]:
        for row in self.dataset:
            self.number += 1
            yield self.number - 1, row


class StreamedRows:
    """The rows of a stream, in order or shuffled block by block."""

    def __init__(
        self,
        open_stream: Callable[[], Stream[Any]],
        shown: str,
        *,
        shuffle: bool,
        seed: int,
        buffer: int,
    ) -> None:
        self._open, self.shown = open_stream, shown
        self.shuffle, self.seed, self.buffer = shuffle, seed, buffer if shuffle else 1
        self._at: BlockPlace = {"block": 0, "taken": 0, "stream": None}
        self._live: Stream[Any] | None = None
        self.columns = self._columns()

    def read(self, place: BlockPlace | None) -> Iterator[NumberedRow]:
        """Rows from a place on. Raises `UserError` when the stream breaks off."""
        stream = self._open()
        begin: BlockPlace = place or {"block": 0, "taken": 0, "stream": None}
        if begin["stream"] is not None:
            stream.seek(begin["stream"])
        rows = iter(stream)
        block, taken = begin["block"], begin["taken"]
        while True:
            start = stream.at if self.shuffle else None
            held = self._block(rows)
            if not held:
                return
            order = (
                stable_permutation(len(held), self.seed, block)
                if self.shuffle
                else range(len(held))
            )
            for used in range(taken, len(held)):
                if self.shuffle:
                    self._at = {"block": block, "taken": used + 1, "stream": start}
                else:  # a dataset's own state is costly: it is taken when the position is asked for
                    self._at, self._live = {"block": block + 1, "taken": 0, "stream": None}, stream
                yield held[int(order[used])]
            block, taken = block + 1, 0

    def place(self) -> BlockPlace:
        return self._at if self._live is None else {**self._at, "stream": self._live.at}

    def _block(self, rows: Iterator[Any]) -> list[Any]:
        held = []
        try:
            for row in rows:
                held.append(row)
                if len(held) == self.buffer:
                    break
        except OSError as error:
            raise UserError(
                f"dataset '{self.shown}' broke off ({error}). The same command continues where it "
                "stopped."
            ) from error
        return held

    def _columns(self) -> list[str]:
        names: dict[str, None] = {}
        for count, (_, row) in enumerate(self._open()):
            if isinstance(row, Mapping):
                names.update(dict.fromkeys(row))
            if count >= 20:
                break
        return list(names)


def open_rows_streaming(
    path: str,
    name: str | None,
    split: str,
    revision: str | None,
    *,
    shuffle: bool,
    seed: int,
    buffer: int,
) -> StreamedRows:
    """A dataset as a stream; raises `UserError` when it cannot be opened."""
    files = local_files(path)
    kinds = {file.suffix for file in files} if isinstance(files, list) else set()

    def open_source() -> Stream[Any]:
        if isinstance(files, list) and kinds == {LINES}:
            return LineStream(files)
        if isinstance(files, list) and kinds == {".parquet"}:
            return ParquetStream(files, path)
        return DatasetStream(open_stream(path, files, name, split, revision))

    return StreamedRows(open_source, path, shuffle=shuffle, seed=seed, buffer=buffer)


def _parse(line: bytes) -> RawRow | BadRowError:
    try:
        row = json.loads(line)
    except (json.JSONDecodeError, UnicodeDecodeError):
        return BadRowError("the line is not valid JSON")
    return row if isinstance(row, Mapping) else BadRowError("the line is not a JSON object")
