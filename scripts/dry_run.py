"""A dry run of the data path at size: `python -m scripts.dry_run --rows 1000000` writes docs/reports/million_rows.json.

Synthetic conversations in three sources (jsonl streamed and shuffled, parquet streamed, a shuffled jsonl table) go through the
mixture, the search for repeated, similar and held-out rows, generation (the target is skipped: a seeded stand-in answers), shards,
packing and the step loader. Repeats are planted, so what is found can be checked. Resident memory and time are taken all along,
phase by phase; the exit status is 1 when memory is not flat within 200 MB or the time per row not constant within the limit below.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from inference.decoding.config import DecodeConfig
from inference.decoding.requests import Completion, Request
from inference.manifest import write_json
from inference.target.loading import TargetConfig
from scripts.run import session
from train.data.config import DataConfig, SourceConfig
from train.data.loader import StepLoader
from train.data.pack import PackedData
from train.generate.config import GenerateConfig
from train.generate.run import generate
from train.generate.target_facts import TargetFacts
from train.generate.turns import Refused

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "assets" / "tiny-target"
REPORT = ROOT / "docs" / "reports" / "million_rows.json"
FLAT_MB = 200.0
"""Most that resident memory may differ between two moments, from the first twentieth of the rows on."""
CONSTANT = 1.5
"""Most that processor time per row in the last tenth of a phase may exceed that of its second tenth (the first one warms up)."""
SHARES = {"stream": 0.5, "table": 0.3, "shuffled": 0.2}
REPEATED, SIMILAR, HELD_OUT = 0.02, 0.01, 0.001
"""Shares of planted rows."""
VOCABULARY = 30_000
SEQUENCE = 2048
WRITTEN = 10_000
"""Synthetic rows that are made together."""


@dataclass
class Meter:
    """Memory and time by phase. A mark: rows done, wall seconds, processor seconds, resident MB."""

    marks: dict[str, list[tuple[int, float, float, float]]] = field(default_factory=dict)

    def watch(self, phase: str, rows: int) -> None:
        """Note how far a phase is."""
        found = self.marks.setdefault(phase, [])
        if not found or rows > found[-1][0]:
            found.append((rows, time.perf_counter(), time.process_time(), resident_mb()))

    def phase(self, name: str) -> dict[str, Any]:
        """A phase in figures: time per row altogether and by tenth, and the range of resident memory."""
        marks = self.marks[name]
        rows, wall, processor, memory = (np.array(column, dtype=float) for column in zip(*marks, strict=True))
        edges = np.linspace(rows[0], rows[-1], 11)
        tenths = np.diff(np.interp(edges, rows, processor)) / np.maximum(np.diff(edges), 1e-9)
        done = max(1.0, rows[-1] - rows[0])
        return {
            "rows": int(rows[-1]),
            "seconds": round(float(wall[-1] - wall[0]), 1),
            "us_per_row": round(float((wall[-1] - wall[0]) / done * 1e6), 1),
            "cpu_us_per_row": round(float((processor[-1] - processor[0]) / done * 1e6), 1),
            "cpu_us_per_row_by_tenth": [round(float(tenth * 1e6), 1) for tenth in tenths],
            "last_to_second_tenth": round(float(tenths[-1] / max(tenths[1], 1e-12)), 3),
            "resident_mb": [round(float(memory.min()), 1), round(float(memory.max()), 1)],
        }

    def memory_range(self) -> tuple[float, float]:
        """Lowest and highest resident MB once a twentieth of the rows was read."""
        first = self.marks["read"][-1][0] / 20
        values = [mark[3] for name, marks in self.marks.items() for mark in marks if name != "read" or mark[0] >= first]
        return min(values), max(values)


class StandIn:
    """Answers in the target's place: random ids of random number, a function of the request's seed."""

    def __init__(self, facts: TargetFacts, longest: int) -> None:
        self.vocabulary, self.end, self.longest = facts.info.vocab_size, facts.eos_token_ids[0], longest

    def sample(self, requests: Iterable[Request]) -> Iterator[Completion | Refused]:
        for request in requests:
            draw = np.random.default_rng(request.seed)
            count = int(draw.integers(self.longest // 4, self.longest))
            yield Completion(request, [*draw.integers(8, self.vocabulary, count - 1).tolist(), self.end], "stop")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--out", type=Path, default=REPORT)
    parser.add_argument("--folder", type=Path, help="where data is written and left; else a temporary folder")
    parser.add_argument("--deduplicate", default="near", choices=("exact", "near"))
    given = parser.parse_args(arguments)
    folder = given.folder or Path(tempfile.mkdtemp(prefix="headstart-dry-run-"))
    try:
        report = run(given.rows, folder, given.deduplicate)
    finally:
        if given.folder is None:
            shutil.rmtree(folder, ignore_errors=True)
    write_json(given.out, report)
    print(json.dumps({key: report[key] for key in ("memory", "found", "passed")}, indent=2))
    return 0 if report["passed"]["all"] else 1


def run(rows: int, folder: Path, deduplicate: str) -> dict[str, Any]:
    """Everything, in a folder; the report."""
    meter = Meter()
    planted = write_sources(folder / "sources", rows)
    target = TargetConfig(str(TARGET))
    facts = TargetFacts.load(target)
    decode = DecodeConfig(shape="none", temperature=1.0, max_new_tokens=96)
    data = DataConfig(mixture=sources_of(folder / "sources"), deduplicate=deduplicate, held_out=(str(folder / "held_out.jsonl"),))
    meter.watch("read", 0)
    manifest = generate(
        GenerateConfig(),
        data,
        decode,
        target,
        folder / "generate",
        backend=StandIn(facts, decode.max_new_tokens),
        watch=meter.watch,
    )
    packed = PackedData.from_manifest(folder / "generate", facts.info, SEQUENCE, watch=meter.watch)
    read_all(packed, meter)
    return report_of(rows, planted, manifest, packed, meter, folder)


def read_all(packed: PackedData, meter: Meter) -> None:
    """One epoch through the loader, as a training reads it."""
    loader = StepLoader(packed, global_batch=8, micro_batch=8, world_size=1, rank=0, seed=0)
    for index, _ in loader.iterate(0, loader.steps_per_epoch):
        if index % 50 == 0 or index + 1 == loader.steps_per_epoch:
            meter.watch("load", (index + 1) * 8)


def report_of(
    rows: int, planted: dict[str, int], manifest: dict[str, Any], packed: PackedData, meter: Meter, folder: Path
) -> dict[str, Any]:
    """million_rows.json's content: memory in MB over the whole run, seconds per row by phase, planted repeats against those found,
    and whether memory stayed within FLAT_MB and time per row within CONSTANT.
    """
    phases = {name: meter.phase(name) for name in meter.marks}
    low, high = meter.memory_range()
    constant = {name: figures["last_to_second_tenth"] <= CONSTANT for name, figures in phases.items()}
    flat = high - low <= FLAT_MB
    return {
        "format": 1,
        "rows": rows,
        "memory": {
            "low_mb": round(low, 1),
            "high_mb": round(high, 1),
            "range_mb": round(high - low, 1),
            "allowed_mb": FLAT_MB,
        },
        "phases": phases,
        "planted": planted,
        "found": manifest["input"]["left_out"],
        "sources": [
            {**source, "path": Path(source["path"]).relative_to(folder).as_posix()} for source in manifest["input"]["sources"]
        ],
        "counts": manifest["counts"],
        "packed": vars(packed.report) | {"sequence_length": SEQUENCE},
        "disk_bytes": sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()),
        "passed": {"memory": flat, "time": constant, "all": flat and all(constant.values())},
        "run": session() | {"command": ["python", "-m", "scripts.dry_run", *sys.argv[1:]]},
    }


# ---- synthetic sources -------------------------------------------------------------------------------------------


def sources_of(folder: Path) -> tuple[SourceConfig, ...]:
    """The mixture: weights as the sources' sizes, so that all run out near the end."""
    return (
        SourceConfig(
            str(folder / "stream.jsonl"),
            weight=SHARES["stream"],
            id_column="id",
            streaming=True,
            shuffle=True,
            buffer=5000,
        ),
        SourceConfig(str(folder / "table.parquet"), weight=SHARES["table"], id_column="id", streaming=True),
        SourceConfig(str(folder / "shuffled.jsonl"), weight=SHARES["shuffled"], id_column="id", shuffle=True),
    )


def write_sources(folder: Path, rows: int) -> dict[str, int]:
    """Write the three sources and the held-out prompts; how many repeats of each sort were planted."""
    folder.mkdir(parents=True, exist_ok=True)
    held = [" ".join(words(np.random.default_rng(7 + number), 40)) for number in range(200)]
    lines = [json.dumps({"id": f"held-{number}", "prompt": text}) for number, text in enumerate(held)]
    (folder.parent / "held_out.jsonl").write_text("\n".join(lines), encoding="utf-8")
    planted = {"repeated": 0, "similar": 0, "held_out": 0}
    for number, (name, share) in enumerate(SHARES.items()):
        made = synthetic(int(rows * share), number, held, planted)
        if name == "table":
            write_parquet(folder / "table.parquet", made)
            continue
        with (folder / f"{name}.jsonl").open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in made)
    return planted


def synthetic(count: int, source: int, held: Sequence[str], planted: dict[str, int]) -> Iterator[dict[str, Any]]:
    """Rows with one user message of 30 to 120 made-up words, some of them planted repeats of the row before."""
    draw = np.random.default_rng([11, source])
    before = words(draw, 60)
    for number in range(count):
        kind = draw.random()
        text = words(draw, int(draw.integers(30, 120)))
        if kind < REPEATED:
            planted["repeated"] += 1
            text = [word.upper() for word in before]
        elif kind < REPEATED + SIMILAR:
            planted["similar"] += 1
            text = [*before[:-1], "otherwise"]
        elif kind < REPEATED + SIMILAR + HELD_OUT:
            planted["held_out"] += 1
            text = [*text[:20], held[number % len(held)], *text[20:]]
        else:
            before = text
        yield {"id": f"{source}-{number}", "messages": [{"role": "user", "content": " ".join(text)}]}


def words(draw: np.random.Generator, count: int) -> list[str]:
    """Made-up words of four to seven letters, each one a function of its number."""
    return [_word(number) for number in draw.integers(0, VOCABULARY, count).tolist()]


def _word(number: int) -> str:
    letters = "etaoinshrdlcumwf"
    value = number * 2654435761 % 2**32
    return "".join(letters[value >> (4 * place) & 15] for place in range(4 + number % 4))


def write_parquet(path: Path, rows: Iterator[dict[str, Any]]) -> None:
    """Write rows as they come, some thousand at a time."""
    writer: pq.ParquetWriter | None = None
    held: list[dict[str, Any]] = []
    for row in rows:
        held.append(row)
        if len(held) == WRITTEN:
            writer = _write_some(path, held, writer)
            held = []
    if held or writer is None:
        writer = _write_some(path, held, writer)
    writer.close()


def _write_some(path: Path, rows: list[dict[str, Any]], writer: pq.ParquetWriter | None) -> pq.ParquetWriter:
    table = pa.Table.from_pylist(rows)
    writer = pq.ParquetWriter(path, table.schema) if writer is None else writer
    writer.write_table(table)
    return writer


def resident_mb() -> float:
    """Resident memory of this process, in MB, pages of mapped files included."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * 4096 / 1e6


if __name__ == "__main__":
    sys.exit(main())
