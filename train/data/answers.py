"""Answers on disk while they are being generated: small part files that survive a kill, merged into shards at
the end.

Every input row ends up in exactly one part file, as done, failed or skipped, so what is left to do after an
interruption is what no part holds. Parts are written completely or not at all (temporary file, then rename)
and carry the first row's index in their name, so that any number of processes can write side by side. Merging
sorts by index: the shards do not depend on who wrote what when.
"""

from __future__ import annotations

import json
import shutil
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from heads.api.errors import UserError
from inference.chat import Span
from inference.manifest import MANIFEST_FILE, file_entry, write_bytes

SHARD_SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("index", pa.int64()),
        ("domain", pa.string()),
        ("tokens", pa.list_(pa.int32())),
        ("spans", pa.list_(pa.list_(pa.int32()))),
        ("finish", pa.string()),
        ("seed", pa.int64()),
    ]
)
PART_SCHEMA = SHARD_SCHEMA.append(pa.field("status", pa.string())).append(pa.field("reason", pa.string()))
DONE, FAILED, SKIPPED = "done", "failed", "skipped"
PARTS, SHARDS, FAILURES, SETTINGS, LOCK = "parts", "shards", "failures.jsonl", "generate.json", ".lock"


@dataclass(frozen=True)
class Answer:
    """What became of one input row. tokens: prompt and answer; spans: [start, end) of what is supervised;
    reason: if not done."""

    id: str
    index: int
    domain: str
    tokens: tuple[int, ...] = ()
    spans: tuple[Span, ...] = ()
    finish: str = ""
    seed: int = 0
    status: str = DONE
    reason: str = ""


@dataclass(frozen=True)
class Merged:
    """The result of a merge: manifest entries of the shards and of the failures, counts, and skip or failure
    reasons by frequency."""

    shards: list[dict[str, Any]]
    failures: dict[str, Any]
    counts: dict[str, int]
    reasons: dict[str, int]


class PartWriter:
    """Collects answers and writes a part file every `rows` answers or `seconds`, and once more on leaving the
    `with` block."""

    def __init__(self, out: Path, rows: int, seconds: float) -> None:
        self.folder = out / PARTS
        self.rows, self.seconds = rows, seconds
        self.written = 0
        self._waiting: list[Answer] = []
        self._last = time.monotonic()

    def __enter__(self) -> PartWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.flush()

    def add(self, answer: Answer) -> None:
        """Take an answer; it is safe on disk after the next flush."""
        self._waiting.append(answer)
        if len(self._waiting) >= self.rows or time.monotonic() - self._last >= self.seconds:
            self.flush()

    def flush(self) -> None:
        """Write what waits. Signals are held back meanwhile, so an interruption finds a row either waiting or
        written."""
        self._last = time.monotonic()
        if not self._waiting:
            return
        with _signals_held():
            table = pa.Table.from_pylist([asdict(answer) for answer in self._waiting], schema=PART_SCHEMA)
            name = f"{self._waiting[0].index:010d}-{len(self._waiting)}.parquet"
            write_bytes(self.folder / name, _parquet(table))
            self.written += len(self._waiting)
            self._waiting = []


def read_done(out: Path) -> list[int]:
    """Indices of all rows that part files hold already, sorted; half-written temporary files are removed."""
    for partial in (out / PARTS).glob("*.partial"):
        partial.unlink()
    return sorted(
        index for part in _parts(out) for index in _read(part, columns=["index"]).column("index").to_pylist()
    )


def merge_parts(out: Path, total: int, shard_rows: int) -> Merged:
    """Write the shards of a finished generation in index order, at most `shard_rows` each, and
    failures.jsonl.

    Raises `UserError` unless the parts hold every index of range(total) exactly once. Holds one shard in
    memory at a time.
    """
    overview = pa.concat_tables(
        [_read(part, columns=["index", "id", "domain", "status", "reason"]) for part in _parts(out)]
    ).sort_by("index")
    found = overview.column("index").to_numpy()
    if not np.array_equal(found, np.arange(total)):
        raise UserError(
            f"the part files in '{out / PARTS}' hold {len(found)} rows for an input of {total}, or some "
            "twice: files were added, "
            "removed or exchanged there. Delete the output folder and run again."
        )
    done = found[pc.equal(overview.column("status"), DONE).to_numpy()]
    shards, tokens = _write_shards(out, done, shard_rows)
    rest = overview.filter(pc.not_equal(overview.column("status"), DONE)).to_pylist()
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rest)
    write_bytes(out / FAILURES, lines.encode("utf-8"))
    by_status = Counter(overview.column("status").to_pylist())
    counts = {
        "input": total,
        **{status: by_status[status] for status in (DONE, FAILED, SKIPPED)},
        "tokens": tokens,
    }
    assert counts[DONE] + counts[FAILED] + counts[SKIPPED] == total, counts
    reasons = dict(Counter(row["reason"] for row in rest).most_common())
    return Merged(shards, file_entry(out, FAILURES, rows=len(rest)), counts, reasons)


def remove_parts(out: Path) -> None:
    """Remove the part files, once a manifest lists the shards made of them."""
    shutil.rmtree(out / PARTS, ignore_errors=True)


def clear_output(out: Path) -> None:
    """Remove everything that generation writes to `out`, and nothing else; the manifest first, so a kill
    leaves no half of it valid."""
    for name in (MANIFEST_FILE, SETTINGS, FAILURES):
        (out / name).unlink(missing_ok=True)
    for name in (PARTS, SHARDS):
        shutil.rmtree(out / name, ignore_errors=True)


@contextmanager
def output_lock(out: Path, exclusive: bool) -> Iterator[None]:
    """Hold the folder's lock while generating; the system lets go of it when the process dies, however it
    dies.

    exclusive: taken by the main process first, to find that nobody else (an orphan of a killed run, say)
    writes here; it is then shared with the run's other processes. Raises `UserError` when another run holds
    it.
    """
    import fcntl

    out.mkdir(parents=True, exist_ok=True)
    with (out / LOCK).open("a") as file:
        try:
            fcntl.flock(file, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(
                f"another process is generating into '{out}' (perhaps left over from a killed run). Wait for "
                "it or end it, "
                "or give another output folder."
            ) from error
        fcntl.flock(file, fcntl.LOCK_SH)
        yield


def _write_shards(out: Path, done: np.ndarray, shard_rows: int) -> tuple[list[dict[str, Any]], int]:
    """Manifest entries of the shards, and how many answer tokens they hold. Shards of an earlier merge are
    replaced."""
    shutil.rmtree(out / SHARDS, ignore_errors=True)
    ranges = [(part, *_range(part)) for part in _parts(out)]
    entries, tokens = [], 0
    for number, begin in enumerate(range(0, len(done), shard_rows)):
        chunk = done[begin : begin + shard_rows]
        first, last = int(chunk[0]), int(chunk[-1])
        wanted = [("index", ">=", first), ("index", "<=", last), ("status", "=", DONE)]
        table = pa.concat_tables(
            [_read(part, filters=wanted) for part, low, high in ranges if low <= last and high >= first]
        )
        table = table.sort_by("index").select(SHARD_SCHEMA.names)
        assert np.array_equal(table.column("index").to_numpy(), chunk)
        tokens += sum(end - start for spans in table.column("spans").to_pylist() for start, end in spans)
        name = f"{SHARDS}/shard-{number:05d}.parquet"
        write_bytes(out / name, _parquet(table))
        entries.append(file_entry(out, name, rows=len(table)))
    return entries, tokens


def _parts(out: Path) -> list[Path]:
    return sorted((out / PARTS).glob("*.parquet"))


def _range(part: Path) -> tuple[int, int]:
    bounds = pc.min_max(_read(part, columns=["index"]).column("index")).as_py()
    return bounds["min"], bounds["max"]


def _read(part: Path, **arguments: Any) -> pa.Table:
    try:
        return pq.read_table(part, **arguments)
    except (pa.ArrowInvalid, OSError) as error:
        raise UserError(
            f"part file '{part}' is damaged ({error}). Delete it and run again: its answers are generated "
            "again."
        ) from error


def _parquet(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    content: bytes = sink.getvalue().to_pybytes()
    return content


@contextmanager
def _signals_held() -> Iterator[None]:
    """Let the system keep SIGINT and SIGTERM for this thread until the block ends."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
