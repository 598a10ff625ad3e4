"""Finds repeated and similar rows with memory for one part of the keys at a time.

Keys (of ids, of whole texts, of MinHash bands) are appended to one of `PARTITIONS` files each,
chosen by the key's highest bits. So equal keys are in the same file, and each file is sorted alone.
Signatures lie in one file by row. All files are read and written sequentially.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from train.data.dedup.shingles import SIGNATURE, Hashes

PARTITIONS = 64
ENTRY = np.dtype([("key", "<u8"), ("row", "<i8")])
Numbers = NDArray[np.int64]
AT_ONCE = 16
"""Files that are brought to the disk at once."""
COMPARED = 8192
"""Pairs whose signatures are compared together."""

KEPT, SAME_ID, SAME_TEXT, NEAR, HELD_OUT, VALIDATION, BENCH, REPEATS_HELD = range(8)
REASONS = {
    SAME_ID: "the id or the content is that of an earlier row",
    SAME_TEXT: "the text is that of an earlier row but for case, signs and spaces",
    NEAR: "most of the text is that of an earlier row",
    HELD_OUT: "it repeats a held-out prompt",
    VALIDATION: "held out for tau during training",
    BENCH: "held out for measuring",
    REPEATS_HELD: "it repeats a prompt that is held out of this data",
}
"""Why rows are left out, by verdict."""


def append_durably(path: Path, values: NDArray[Any]) -> None:
    """Append values to a file and bring them to the disk, so that a file written later can count
    them, also after a power failure."""
    with path.open("ab") as file:
        file.write(values.tobytes())
        file.flush()
        os.fsync(file.fileno())


class KeyFiles:
    """Append-only files of (key, row) pairs below `folder`, for several kinds of keys."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def add(self, kind: str, keys: Hashes, rows: Numbers) -> None:
        """Append pairs [n]; they are on the disk then. Rows must come in ascending order over all
        calls."""
        self.folder.mkdir(parents=True, exist_ok=True)
        where = (keys >> np.uint64(64 - 6)).astype(np.int64)
        order = np.argsort(where, kind="stable")
        entries = np.empty(len(keys), dtype=ENTRY)
        entries["key"], entries["row"] = keys[order], rows[order]
        bounds = np.searchsorted(where[order], np.arange(PARTITIONS + 1))
        parts = [entries[begin:end] for begin, end in pairwise(bounds)]
        given = [(self._path(kind, number), part) for number, part in enumerate(parts) if len(part)]
        # one file after another takes 20 times as long until all are on the disk
        with ThreadPoolExecutor(AT_ONCE) as pool:
            for written in [pool.submit(append_durably, *one) for one in given]:
                written.result()

    def count(self) -> int:
        """The number of entries of all kinds."""
        return sum(path.stat().st_size for path in self.folder.glob("*.keys")) // ENTRY.itemsize

    def forget_from(self, row: int) -> int:
        """Drop the entries that an interrupted run wrote for rows from `row` on; returns how many
        are left."""
        left = 0
        for path in self.folder.glob("*.keys"):
            entries = np.fromfile(path, dtype=ENTRY, count=path.stat().st_size // ENTRY.itemsize)
            kept = entries[: int(np.searchsorted(entries["row"], row))]
            with path.open("r+b") as file:
                file.truncate(len(kept) * ENTRY.itemsize)
            left += len(kept)
        return left

    def repeats(self, kind: str) -> Iterator[tuple[Numbers, Numbers, Numbers]]:
        """By partition: rows whose key an earlier row has, the first and the latest such row."""
        paths = [self._path(kind, partition) for partition in range(PARTITIONS)]
        for path in filter(Path.is_file, paths):
            entries = np.fromfile(path, dtype=ENTRY)
            # within a key, rows stay ascending
            entries = entries[np.argsort(entries["key"], kind="stable")]
            rows, keys = entries["row"].astype(np.int64), entries["key"]
            fresh = np.ones(len(keys), dtype=bool)
            fresh[1:] = keys[1:] != keys[:-1]
            firsts = rows[np.maximum.accumulate(np.where(fresh, np.arange(len(rows)), 0))]
            again = np.flatnonzero(~fresh)
            yield rows[again], firsts[again], rows[again - 1]

    def _path(self, kind: str, partition: int) -> Path:
        return self.folder / f"{kind}-{partition:02d}.keys"


def judge(
    keys: KeyFiles, signatures: Path | None, total: int, near_share: float, held_out: Numbers
) -> NDArray[np.uint8]:
    """Verdict of every row [total]: kept, or why not. Of rows that repeat each other, the first is
    kept. signatures: a file with a MinHash signature per row, None if similar rows are kept. A row
    is compared with the first and the latest earlier row of each band that they share."""
    verdict = np.zeros(total, dtype=np.uint8)
    if signatures is not None:
        for rows, *earlier in keys.repeats("band"):
            for others in earlier:
                verdict[rows[_similar(signatures, rows, others, near_share)]] = NEAR
    for kind, code in (("text", SAME_TEXT), ("id", SAME_ID)):
        for rows, _, _ in keys.repeats(kind):
            verdict[rows] = code
    verdict[held_out] = HELD_OUT
    return verdict


def _similar(signatures: Path, rows: Numbers, others: Numbers, share: float) -> NDArray[np.bool_]:
    """For pairs [n] of rows: whether their signatures agree in at least `share` of the values."""
    found = np.zeros(len(rows), dtype=bool)
    for begin in range(0, len(rows), COMPARED):
        # Mapped anew each time, so that pages that were read are released with the map.
        table = np.memmap(signatures, dtype=np.uint32, mode="r").reshape(-1, SIGNATURE)
        one, two = table[rows[begin : begin + COMPARED]], table[others[begin : begin + COMPARED]]
        found[begin : begin + COMPARED] = (one == two).mean(axis=1) >= share
    return found
