"""Selection of a cycle's training data from a server's samples: which answers, from which clients,
and which prompts are held out.

No client exceeds its share: with t_i the sampled tokens of client i of n, client i contributes
min(t_i, c) of them, c being the largest number with

    c <= max(client_share, 1 / n) sum_i min(t_i, c)   and   sum_i min(t_i, c) <= most_tokens,

and whole answers are taken, newest first, until c is reached. So one client's part exceeds its
share by less than one answer, however fast it sends.

Prompts are held out by a hash of their tokens: equal prompts are always on the same side, in every
cycle.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from inference.manifest import write_bytes, write_json
from inference.measure.prompts import Prompt
from inference.server.samples import batch_files, batches
from inference.verifications import (
    FACTS_FILE,
    RECORDS,
    SCHEMAS,
    SEQUENCES,
    VERIFICATIONS,
    read_facts,
)
from train.data.answers import parquet_bytes
from train.learning.config import LearnConfig

Row = dict[str, Any]
"""A row of sequences."""
VALIDATION, MEASURING = "validation.jsonl", "measuring.jsonl"
TRAIN_SIDE = "train"
_SPAN = 2.0**64


@dataclass(frozen=True)
class TrafficTotals:
    """Sums over answers. tokens: of answers; tau: committed tokens per verification."""

    answers: int
    tokens: int
    passes: int
    tau: float


@dataclass
class Sampled:
    """Batches that were read. names: those of the complete batches; sequences: their rows, oldest
    first; verifications: their tables."""

    names: list[str] = field(default_factory=list)
    sequences: list[Row] = field(default_factory=list)
    verifications: list[pa.Table] = field(default_factory=list)

    def totals(self) -> TrafficTotals:
        """The sums over all answers; those without a verification do not count."""
        passes = sum(table.num_rows for table in self.verifications)
        tokens = sum(row["answer_length"] for row in self.sequences)
        committed = tokens - len(self.sequences)  # the first token comes from reading the prompt
        tau = committed / passes if passes else 1.0
        return TrafficTotals(len(self.sequences), tokens, passes, tau)


def read_samples(folder: Path, after: str = "", until: str | None = None) -> Sampled:
    """The batches after the one named `after`, up to and including `until` if given. A batch that
    the server drops meanwhile, or that is damaged, is left out."""
    found = Sampled()
    for name in batches(folder):
        if name <= after or (until is not None and name > until):
            continue
        sequences, verifications = batch_files(folder, name)
        try:
            rows = pq.read_table(sequences, schema=SCHEMAS[SEQUENCES]).to_pylist()
            table = pq.read_table(verifications, schema=SCHEMAS[VERIFICATIONS])
        except (OSError, pa.ArrowInvalid):
            continue
        found.names.append(name)
        found.sequences += rows
        found.verifications.append(table)
    return found


# Choosing


def client_limit(tokens: Iterable[int], share: float, most: int) -> int:
    """The largest number of tokens c of one client; see the module. tokens: of each client."""
    counts = list(tokens)
    allowed = max(share, 1.0 / len(counts)) if counts else 1.0

    def fits(limit: int) -> bool:
        taken = sum(min(count, limit) for count in counts)
        return limit <= allowed * taken * (1.0 + 1e-12) and taken <= most

    low, high = 0, max(counts, default=0)
    if sum(counts) <= most and high <= allowed * sum(counts):
        return high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return max(low, 1)


def choose(rows: Sequence[Row], share: float, most: int) -> list[Row]:
    """The answers to train on, in the order given, which is oldest first."""
    by_client: dict[str, list[Row]] = defaultdict(list)
    for row in reversed(rows):
        by_client[row["client"] or ""].append(row)
    counts = {name: sum(row["answer_length"] for row in own) for name, own in by_client.items()}
    limit, chosen = client_limit(counts.values(), share, most), set[str]()
    taken, total = dict.fromkeys(by_client, 0), 0
    for row in reversed(rows):  # answers are taken whole: the last one of a client may pass c
        client = row["client"] or ""
        if taken[client] >= limit or total + row["answer_length"] > most:
            continue
        taken[client] += row["answer_length"]
        total += row["answer_length"]
        chosen.add(row["sequence"])
    return [row for row in rows if row["sequence"] in chosen]


def side_of(prompt: Sequence[int], config: LearnConfig) -> str:
    """Whether a prompt is trained on, or which file of held-out prompts it belongs to."""
    key = f"{config.seed}:".encode() + array("q", prompt).tobytes()
    place = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") / _SPAN
    if place >= config.held_out:
        return TRAIN_SIDE
    return VALIDATION if place < config.held_out / 2 else MEASURING


@dataclass
class Split:
    """Answers by side: rows that are trained on, and held-out prompts by file."""

    train: list[Row]
    held_out: dict[str, list[Prompt]]

    @property
    def usable(self) -> bool:
        """Whether every side has answers or prompts."""
        return bool(self.train) and all(self.held_out.values())


def split(rows: Sequence[Row], config: LearnConfig) -> Split:
    """Divide chosen answers; each prompt is held out once, the newest ones first."""
    found = Split([], {VALIDATION: [], MEASURING: []})
    seen = set[tuple[int, ...]]()
    for row in reversed(rows):
        prompt = tuple(row["tokens"][: row["prompt_length"]])
        side = side_of(prompt, config)
        if side == TRAIN_SIDE:
            found.train.append(row)
        elif prompt not in seen and len(found.held_out[side]) < config.held_out_prompts:
            seen.add(prompt)
            found.held_out[side].append(Prompt(row["sequence"], row["domain"], tokens=prompt))
    found.train.reverse()
    return found


# Writing


def write_cycle(samples: Path, sampled: Sampled, parts: Split, out: Path) -> None:
    """Write a cycle's records and held-out prompts to `out`; files of an earlier try are
    replaced."""
    for name, prompts in parts.held_out.items():
        lines = "".join(json.dumps(prompt.to_line()) + "\n" for prompt in prompts)
        write_bytes(out / name, lines.encode())
    names = pa.array([row["sequence"] for row in parts.train], pa.string())
    whole = pa.concat_tables([SCHEMAS[VERIFICATIONS].empty_table(), *sampled.verifications])
    verifications = whole.filter(pc.is_in(whole["sequence"], value_set=names))
    sequences = pa.Table.from_pylist(parts.train, SCHEMAS[SEQUENCES])
    tables = {VERIFICATIONS: verifications, SEQUENCES: sequences}
    for name, table in tables.items():
        write_bytes(out / RECORDS / f"{name}-00000.parquet", parquet_bytes(table))
    write_json(out / RECORDS / FACTS_FILE, read_facts(samples))


def largest_share(rows: Sequence[Row]) -> float:
    """The share of the tokens that come from the client with the most."""
    counts = Counter[str]()
    for row in rows:
        counts[row["client"] or ""] += row["answer_length"]
    total = sum(counts.values())
    return max(counts.values()) / total if total else 0.0
