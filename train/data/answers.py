"""Answers on disk while they are being generated: small part files that survive a kill, merged into
shards at the end.

Every input row ends up in exactly one part file, as done, failed or skipped. So after an
interruption, the rows that no part holds remain to be done. Parts are written completely or not at
all (temporary file, then rename) and have the first row's index in their name, so that any number
of processes can write at the same time. Merging sorts by index, so the shards do not depend on
which process wrote which part, or when.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NotRequired

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray
from typing_extensions import TypedDict

from heads.api.errors import UserError
from heads.api.reading import read_bytes
from inference.folders import discard
from inference.manifest import (
    MANIFEST_FILE,
    FileEntry,
    file_entry,
    read_manifest_as,
    verify_file,
    write_bytes,
)
from inference.target.chat import Span
from train.data.states import StatesFacts
from train.memory import give_back_freed_memory


class AnswerRow(TypedDict):
    """A row of `SHARD_SCHEMA`. weights, anchors: per token, if feedback has set them."""

    id: str
    index: int
    domain: str
    tokens: list[int]
    spans: list[list[int]]
    finish: str
    seed: int
    parts: list[int]
    weights: NotRequired[NDArray[np.float32]]
    anchors: NotRequired[NDArray[np.float32]]


SHARD_SCHEMA = pa.schema(
    {
        "id": pa.string(),
        "index": pa.int64(),
        "domain": pa.string(),
        "tokens": pa.list_(pa.int32()),
        "spans": pa.list_(pa.list_(pa.int32())),
        "finish": pa.string(),
        "seed": pa.int64(),
        "parts": pa.list_(pa.int32()),
    }
)
_MORE = {"status": pa.string(), "reason": pa.string(), "cut": pa.int32()}
PART_SCHEMA = pa.schema([*SHARD_SCHEMA, *pa.schema(_MORE)])
DONE, FAILED, SKIPPED = STATUSES = ("done", "failed", "skipped")
PARTS, SHARDS, PACKED, INPUT = "parts", "shards", "packed", "input"
USES, RESERVED = ("validation", "bench"), "{}.jsonl"
"""The uses of held-out prompts, and their files in `INPUT`."""
FAILURES, SETTINGS = "failures.jsonl", "generate.json"
SERVED = f"{PARTS}/served.json"
"""The models that servers named, until all rows are answered."""


class AnswersManifest(TypedDict):
    """A finished folder of answers, as generation and feedback write it (docs/formats.md); fields
    that earlier versions did not write are `NotRequired`."""

    format: int
    stage: str
    round: NotRequired[int]
    target: dict[str, object]
    sampling: NotRequired[dict[str, object]]
    """Settings of the decoder."""
    data: NotRequired[dict[str, object]]
    """Settings of the sources."""
    input: NotRequired[dict[str, Any]]
    counts: dict[str, int]
    truncated: NotRequired[dict[str, int]]
    """Rows and tokens."""
    reasons: NotRequired[dict[str, int]]
    """Rows without an answer."""
    held_out: NotRequired[dict[str, FileEntry]]
    """Prompts that were held out of the data, by use: validation, bench."""
    shards: list[FileEntry]
    failures: NotRequired[FileEntry]
    records: NotRequired[dict[str, Any]]
    """Folder, rows of both tables, answers without a record."""
    served: NotRequired[list[dict[str, str]]]
    """Name and root of the models that servers named."""
    replay: NotRequired[bool]
    """Only tokens near a drafter's errors are supervised (feedback.replay)."""
    states: NotRequired[StatesFacts]
    """Hidden states of the servers."""
    provenance: NotRequired[dict[str, object]]


def read_answers(folder: Path) -> AnswersManifest:
    """The manifest of a folder of answers; raises `UserError` if there is none."""
    return read_manifest_as(AnswersManifest, folder, "generate")


def held_out_prompts(folder: Path, use: str) -> Path | None:
    """The file of prompts that the generation of these answers held out, for `use` (validation or
    bench); None if there are no answers or nothing was held out. Raises `UserError` for a file that
    was changed since."""
    if not (folder / MANIFEST_FILE).is_file():
        return None
    entry = read_answers(folder).get("held_out", {}).get(use)
    return verify_file(folder, entry) if entry else None


def copy_held_out(sources: Sequence[Path], out: Path) -> dict[str, dict[str, FileEntry]]:
    """Copy the prompts that were held out of the first of several folders of answers to `out`,
    whose answers come from these folders; returns the manifest's entry, empty for none."""
    found = {}
    for use in USES:
        files = (held_out_prompts(folder, use) for folder in sources)
        file = next((path for path in files if path is not None), None)
        if file is not None:
            name = f"{INPUT}/{RESERVED.format(use)}"
            content = read_bytes(file)
            write_bytes(out / name, content)
            found[use] = file_entry(out, name, rows=content.count(b"\n"))
    return {"held_out": found} if found else {}


Watch = Callable[[str, int], None]
"""Called with the name of a phase and the number of rows it has done."""


def ignore(phase: str, rows: int) -> None:
    """Watches nothing."""


@dataclass(frozen=True)
class StoredAnswer:
    """One row's answer, or why there is none. tokens: prompt and answer; spans: [start, end) of the
    supervised tokens; parts: where the second and later documents begin; reason: if not done; cut:
    tokens that a truncation policy removed."""

    id: str
    index: int
    domain: str
    tokens: tuple[int, ...] = ()
    spans: tuple[Span, ...] = ()
    finish: str = ""
    seed: int = 0
    parts: tuple[int, ...] = ()
    status: str = DONE
    reason: str = ""
    cut: int = 0


Before = Callable[[str, list[StoredAnswer]], None]


@dataclass(frozen=True)
class Merged:
    """Manifest entries, counts, reasons by frequency, and the rows and tokens truncated."""

    shards: list[FileEntry]
    failures: FileEntry
    counts: dict[str, int]
    reasons: dict[str, int]
    truncated: dict[str, int]


class PartWriter:
    """Writes a part file every `rows` answers or `seconds`, and once more on leaving the block."""

    def __init__(self, out: Path, rows: int, seconds: float, before: Before | None = None) -> None:
        """before: called with a part's name and answers just before that part is written."""
        self.folder = out / PARTS
        self.rows, self.seconds, self.before = rows, seconds, before
        self.written = 0
        self._waiting: list[StoredAnswer] = []
        self._last = time.monotonic()

    def __enter__(self) -> PartWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.flush()

    def add(self, answer: StoredAnswer) -> None:
        self._waiting.append(answer)
        if len(self._waiting) >= self.rows or time.monotonic() - self._last >= self.seconds:
            self.flush()

    def flush(self) -> None:
        """Write waiting answers; signals are held, so that every row is either waiting or
        written."""
        self._last = time.monotonic()
        if not self._waiting:
            return
        with _hold_signals():
            rows = [vars(answer) for answer in self._waiting]
            name = f"{self._waiting[0].index:010d}-{len(rows)}"
            if self.before is not None:
                self.before(name, self._waiting)
            table = pa.Table.from_pylist(rows, schema=PART_SCHEMA)
            write_bytes(self.folder / f"{name}.parquet", parquet_bytes(table))
            self.written += len(self._waiting)
            self._waiting = []


def read_done(out: Path) -> NDArray[np.int64]:
    """Sorted indices of the rows that part files hold; removes half-written temporary files."""
    for partial in (out / PARTS).glob("*.partial"):
        partial.unlink()
    found = [_read(part, columns=["index"]).column("index").to_numpy() for part in _parts(out)]
    return np.sort(np.concatenate(found)) if found else np.zeros(0, dtype=np.int64)


def merge_parts(out: Path, total: int, shard_rows: int, watch: Watch = ignore) -> Merged:
    """Write the shards in index order, at most `shard_rows` each, and failures.jsonl; one shard is
    in memory at a time. Raises `UserError` unless the parts hold every index of range(total)
    once."""
    ranges, status, truncated = _survey(out, total)
    answered = status == 1 + STATUSES.index(DONE)
    shards, tokens = _write_shards(out, ranges, np.flatnonzero(answered), shard_rows, watch)
    rest = np.flatnonzero(~answered)
    reasons = dict(_write_failures(out, ranges, rest, shard_rows).most_common())
    by_status = {name: int((status == number).sum()) for number, name in enumerate(STATUSES, 1)}
    counts = {"input": total, **by_status, "tokens": tokens}
    failures = file_entry(out, FAILURES, rows=len(rest))
    return Merged(shards, failures, counts, reasons, truncated)


def remove_parts(out: Path) -> None:
    discard(out / PARTS)


def clear_output(out: Path) -> None:
    """Remove everything that generation writes except the input; the manifest first, in case of a
    kill."""
    for name in (MANIFEST_FILE, SETTINGS, FAILURES):
        (out / name).unlink(missing_ok=True)
    for name in (PARTS, SHARDS, PACKED):
        discard(out / name)


Ranges = list[tuple[Path, int, int]]
"""Part files with the lowest and highest index in each."""


def _survey(out: Path, total: int) -> tuple[Ranges, NDArray[np.uint8], dict[str, int]]:
    """The parts' ranges, each row's status [total] (1 + place in STATUSES), and what was
    truncated."""
    status = np.zeros(total, dtype=np.uint8)
    ranges: Ranges = []
    rows, truncated = 0, {"rows": 0, "tokens": 0}
    for part in _parts(out):
        table = _read(part, columns=["index", "status", "cut"])
        index = table.column("index").to_numpy()
        rows += len(index)
        if len(index) == 0 or index.min() < 0 or index.max() >= total:
            break
        numbers = pc.index_in(table.column("status"), pa.array(STATUSES)).to_numpy()
        status[index] = numbers + 1
        cut = table.column("cut").fill_null(0).to_numpy()
        truncated["rows"] += int((cut > 0).sum())
        truncated["tokens"] += int(cut.sum())
        ranges.append((part, int(index.min()), int(index.max())))
    if rows != total or not status.all():
        raise UserError(
            f"the part files in '{out / PARTS}' hold {rows} rows for an input of {total}, or some "
            "twice: files were added, removed or exchanged there. Delete the output folder and "
            "run again."
        )
    return ranges, status, truncated


def _chunks(ranges: Ranges, wanted: NDArray[np.int64], size: int, done: bool) -> Iterator[pa.Table]:
    """The rows with the `wanted` indices in their order, `size` at a time."""
    for begin in range(0, len(wanted), size):
        chunk = wanted[begin : begin + size]
        first, last = int(chunk[0]), int(chunk[-1])
        near = [part for part, low, high in ranges if low <= last and high >= first]
        status = ("status", "=" if done else "!=", DONE)
        filters = [("index", ">=", first), ("index", "<=", last), status]
        table = pa.concat_tables(_read(part, filters=filters) for part in near).sort_by("index")
        assert np.array_equal(table.column("index").to_numpy(), chunk)
        yield table
        del table  # not held while the next one is read


def _write_shards(
    out: Path, ranges: Ranges, done: NDArray[np.int64], shard_rows: int, watch: Watch
) -> tuple[list[FileEntry], int]:
    """Manifest entries of the shards, which replace earlier ones, and their answer tokens."""
    discard(out / SHARDS)
    entries, tokens = [], 0
    for number, chunk in enumerate(_chunks(ranges, done, shard_rows, done=True)):
        table = chunk.select(SHARD_SCHEMA.names)
        spans = table.column("spans").to_pylist()
        tokens += sum(end - start for several in spans for start, end in several)
        name = f"{SHARDS}/shard-{number:05d}.parquet"
        write_bytes(out / name, parquet_bytes(table))
        entries.append(file_entry(out, name, rows=len(table)))
        del table, chunk
        # a shard is assembled from many parts, whose memory Arrow would keep
        give_back_freed_memory()
        watch("merge", min(len(done), (number + 1) * shard_rows))
    return entries, tokens


def _write_failures(out: Path, ranges: Ranges, rest: NDArray[np.int64], size: int) -> Counter[str]:
    """Write failures.jsonl, a line per row without an answer; returns how often each reason
    occurs."""
    reasons: Counter[str] = Counter()
    partial = out / (FAILURES + ".partial")
    with partial.open("w", encoding="utf-8") as file:
        for table in _chunks(ranges, rest, size, done=False):
            for row in table.select(["index", "id", "domain", "status", "reason"]).to_pylist():
                reasons[row["reason"]] += 1
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, out / FAILURES)
    return reasons


def _parts(out: Path) -> list[Path]:
    return sorted((out / PARTS).glob("*.parquet"))


def _read(part: Path, **arguments: Any) -> pa.Table:
    try:
        return pq.read_table(part, **arguments)
    except (pa.ArrowInvalid, OSError) as error:
        raise UserError(
            f"part file '{part}' is damaged ({error}). Delete it and run again: its answers are "
            "generated again."
        ) from error


def parquet_bytes(table: pa.Table) -> bytes:
    """A table as the content of a parquet file."""
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    content: bytes = sink.getvalue().to_pybytes()
    return content


HELD = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""The signals that wait until a part is written."""


@contextmanager
def _hold_signals() -> Iterator[None]:
    """Hold the signals `HELD` back until the block ends. Their handlers are replaced: a mask holds
    for one thread only, so that another thread would take the signal, and its handler would
    interrupt the main thread all the same. In other threads no handler runs."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    found: dict[int, Any] = {number: signal.getsignal(number) for number in HELD}
    # without those that other code than Python handles, which cannot be restored
    former = {number: handler for number, handler in found.items() if handler is not None}
    held: list[int] = []
    holding = True

    def hold(number: int, frame: FrameType | None) -> None:
        if holding:
            held.append(number)
        else:  # the former handler of another signal has interrupted the restoring below
            signal.signal(number, former[number])
            signal.raise_signal(number)

    try:
        for number in former:
            signal.signal(number, hold)
        yield
    finally:
        holding = False
        for number, handler in former.items():
            signal.signal(number, handler)
        for number in dict.fromkeys(held):
            signal.raise_signal(number)
