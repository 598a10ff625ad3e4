"""Packed rows on disk: one flat file of tokens in row order, and small indexes.

    tokens.bin      int32 per token, row after row; a supervised token t is stored as ~t
    lengths.bin     int32 per document, in the same order
    starts.bin      int64 [R + 1]: where each row's tokens begin
    documents.bin   int64 [R + 1]: where each row's documents begin in lengths.bin
    supervised.bin  int64 [R]
    weights.bin, anchors.bin   float32 per token, only where the answers have them (train/feedback)
    packed.json     what was packed, the report, and size and SHA-256 of each file; written last

Rows are read with positional reads, so the kernel's cache does not count as this process's memory,
which holds 24 bytes per row and 4 per document. Documents are packed in windows, so packing holds
at most one window's tokens.

Legend: R rows, T positions (sequence_length).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO, NotRequired, TypedDict

import numpy as np
from numpy.typing import NDArray

from heads.api.reading import read_object
from inference.folders import discard, put, sweep
from inference.manifest import file_entry, file_sha256, partial_of, write_json
from inference.target.chat import Span
from train.data.masks import Tokens, mask_of

WINDOW_DOCUMENTS = 1 << 16
"""Most documents that are packed together; fewer than that are packed as one, best fit over all of
them."""
WINDOW_TOKENS = 1 << 23
"""Most tokens of a window, which are held in memory (int32) until it is packed."""
PARTS = {
    "tokens": np.int32,
    "lengths": np.int32,
    "starts": np.int64,
    "documents": np.int64,
    "supervised": np.int64,
}
INDEXES = ("lengths", "starts", "documents", "supervised")
EXTRAS = {"weights": np.float32, "anchors": np.float32}
"""Further values per token: see `heads.api.batch.TrainBatch`."""
HEADER = "packed.json"
FORMAT = 1

Weights = Mapping[str, NDArray[np.float32]]
"""Some of `EXTRAS` for the tokens of one document."""
Document = tuple[Tokens, Sequence[Span]] | tuple[Tokens, Sequence[Span], Weights]
Packed = tuple["Counts", Mapping[str, NDArray[Any]], Mapping[str, "FlatFile"]]
"""Counts of packing; the small files, in memory; the files with an entry per token."""


class PackKey(TypedDict):
    """All that decides the packed rows. answers: of the manifest; windows: documents, tokens."""

    answers: str
    sequence_length: int
    vocab_size: int
    windows: list[int]
    extras: NotRequired[list[str]]
    domains: NotRequired[list[str]]


@dataclass
class Counts:
    """Documents kept, cut to the sequence length, or dropped without an answer; their tokens."""

    documents: int = 0
    truncated: int = 0
    dropped: int = 0
    tokens: int = 0
    supervised: int = 0
    rows: int = 0


@dataclass
class Packer:
    """Takes documents one by one and writes their rows to open files, a window at a time."""

    length: int
    files: Mapping[str, BinaryIO]
    window_documents: int = WINDOW_DOCUMENTS
    window_tokens: int = WINDOW_TOKENS
    extras: Sequence[str] = ()
    counts: Counts = field(default_factory=Counts)
    _waiting: list[NDArray[np.int32]] = field(default_factory=list)
    _beside: list[Weights] = field(default_factory=list)
    _held: int = 0
    _written: int = 0
    _numbered: int = 0

    def __post_init__(self) -> None:
        self._put("starts", [0])
        self._put("documents", [0])

    def add_all(self, documents: Iterable[Document]) -> None:
        """Take every document (with its weights if there are `extras`) and write the rest."""
        for tokens, spans, *beside in documents:
            self._add(tokens, spans, beside[0] if beside else {})
        self._pack()

    def _add(self, tokens: Tokens, spans: Sequence[Span], beside: Weights) -> None:
        window = signed_window(tokens, spans, self.length)
        if window is None:
            self.counts.dropped += 1
            return
        signed, begin = window
        self.counts.truncated += len(tokens) > self.length
        size = len(signed)
        if len(self._waiting) == self.window_documents or self._held + size > self.window_tokens:
            self._pack()
        self._waiting.append(signed)
        self._beside.append({name: beside[name][begin : begin + size] for name in self.extras})
        self._held += size

    def _pack(self) -> None:
        """Pack the waiting documents, best fit first, and write the rows."""
        for row in best_fit([len(one) for one in self._waiting], self.length):
            parts = [self._waiting[number] for number in row]
            tokens = np.concatenate(parts)
            supervised = int((tokens < 0).sum())
            self._put("tokens", tokens)
            for name in self.extras:
                self._put(name, np.concatenate([self._beside[number][name] for number in row]))
            self._put("lengths", [len(part) for part in parts])
            self._put("supervised", [supervised])
            self._written += len(tokens)
            self._numbered += len(parts)
            self._put("starts", [self._written])
            self._put("documents", [self._numbered])
            self.counts.rows += 1
            self.counts.supervised += supervised
        self.counts.documents += len(self._waiting)
        self.counts.tokens += self._held
        self._waiting, self._beside, self._held = [], [], 0

    def _put(self, name: str, values: Any) -> None:
        self.files[name].write(np.asarray(values, dtype=(PARTS | EXTRAS)[name]).tobytes())


class FlatFile:
    """Ranges of a flat file with four bytes per token, from the disk or from memory."""

    def __init__(self, source: Path | bytes, dtype: Any) -> None:
        self._dtype = dtype
        self._bytes = source if isinstance(source, bytes) else b""
        self._descriptor = -1 if isinstance(source, bytes) else os.open(source, os.O_RDONLY)

    def read(self, begin: int, end: int) -> NDArray[Any]:
        first, count = 4 * begin, 4 * (end - begin)
        if self._descriptor < 0:
            return np.frombuffer(self._bytes, self._dtype, end - begin, first)
        found = b""
        # one read returns at most 2 GiB, and less on some file systems
        while len(found) < count:
            more = os.pread(self._descriptor, count - len(found), first + len(found))
            if not more:
                raise OSError(f"the packed tokens end before byte {first + count}")
            found += more
        return np.frombuffer(found, self._dtype)

    def __del__(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)


def pack_in_memory(documents: Iterable[Document], length: int) -> Packed:
    files = {name: BytesIO() for name in PARTS}
    packer = Packer(length, files)
    packer.add_all(documents)
    contents = {name: file.getvalue() for name, file in files.items()}
    arrays = {name: np.frombuffer(contents[name], PARTS[name]) for name in INDEXES}
    return packer.counts, arrays, {"tokens": FlatFile(contents["tokens"], PARTS["tokens"])}


def write_packed(folder: Path, documents: Iterable[Document], key: PackKey) -> None:
    """Pack documents into `folder`, whole or not at all; of several processes, the first wins."""
    extras = key.get("extras", [])
    folder.parent.mkdir(parents=True, exist_ok=True)
    sweep(folder.parent)  # of processes that were killed while they packed
    building = partial_of(folder)
    building.mkdir()
    try:
        with ExitStack() as stack:
            paths = {name: building / f"{name}.bin" for name in (*PARTS, *extras)}
            files = {name: stack.enter_context(path.open("wb")) for name, path in paths.items()}
            packer = Packer(key["sequence_length"], files, extras=extras)
            packer.add_all(documents)
        entries = [
            file_entry(building, path.name, bytes=path.stat().st_size) for path in paths.values()
        ]
        header = {"format": FORMAT, "key": key, "counts": asdict(packer.counts), "files": entries}
        write_json(building / HEADER, header)
        if is_whole(folder, key):
            return
        put(building, folder)
    except OSError:
        if not is_whole(folder, key):  # another process may just have put its rows there
            raise
    finally:
        with suppress(OSError):
            discard(building)


def is_whole(folder: Path, key: PackKey, *, thorough: bool = False) -> bool:
    """Whether `folder` holds all packed rows of `key`, of full size (thorough: and unchanged)."""
    try:
        header = read_object(folder / HEADER)
        if header["format"] != FORMAT or header["key"] != dict(key):
            return False
        names = {f"{name}.bin" for name in (*PARTS, *key.get("extras", ()))}
        return {entry["file"] for entry in header["files"]} == names and all(
            (folder / entry["file"]).stat().st_size == entry["bytes"]
            and not (thorough and file_sha256(folder / entry["file"]) != entry["sha256"])
            for entry in header["files"]
        )
    except (OSError, ValueError, KeyError, TypeError):
        return False


def read_packed(folder: Path) -> Packed:
    header = read_object(folder / HEADER)
    arrays = {name: np.fromfile(folder / f"{name}.bin", PARTS[name]) for name in INDEXES}
    names = ("tokens", *header["key"].get("extras", ()))
    flat = {name: FlatFile(folder / f"{name}.bin", (PARTS | EXTRAS)[name]) for name in names}
    return Counts(**header["counts"]), arrays, flat


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Best-fit decreasing bin packing: document numbers per row of at most `capacity` tokens. Each,
    longest first, goes into the fullest row with room for it: open rows are kept by free space, and
    a bit set of the spaces in use finds the smallest that is large enough."""
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


def signed_window(
    tokens: Tokens, spans: Sequence[Span], length: int
) -> tuple[NDArray[np.int32], int] | None:
    """The tokens cut to `length`, supervised ones as ~token, and where the cut begins; or None."""
    mask = mask_of(spans, len(tokens))
    if not mask.any():
        return None
    # The beginning, where an answer reaches into it. Otherwise half of the window is the context
    # right before the first answer and half is the answer (more when the answer ends earlier), so
    # that at least one token is supervised.
    first = int(mask.argmax())
    begin = 0 if first < length else min(first + (length + 1) // 2, len(mask)) - length
    window = np.array(tokens[begin : begin + length], dtype=np.int32)
    kept = mask[begin : begin + length].copy()
    kept[:1] = False  # nothing before the window's first token could predict it
    return np.where(kept, ~window, window), begin
