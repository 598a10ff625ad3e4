"""The number of tokens that a planned training reads: given, packed, or estimated before anything
was generated."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as parquet
from typing_extensions import TypedDict

from heads.api.reading import read_object, require_fit
from train.data.parquet import readable

ASSUMED_ROWS = 100_000
"""Prompts of a dataset that is not on this machine and has no data.limit: an assumption."""


class PackedCounts(TypedDict):
    """The part of `PackedHeader.counts` that is read."""

    tokens: int
    supervised: int


class PackedHeader(TypedDict):
    """The part of packed.json (train/data/packed_file.py) that is read."""

    counts: PackedCounts
    key: dict[str, object]


@dataclass(frozen=True)
class Amount:
    """Tokens of the answers in one pass, the supervised share of them, and the source of both."""

    tokens: int
    supervised: float
    source: str


def packed_amount(answers: Path, length: int, domains: Collection[str] = ()) -> Amount | None:
    """The amount to which the answers of a run (of some domains; empty: all) were packed, in rows
    of `length` tokens; None before that."""
    for header in sorted((answers / "packed").glob("*/packed.json")):
        content = require_fit(PackedHeader, read_object(header), f"'{header}'")
        counts, key = content["counts"], content["key"]
        same = key.get("sequence_length") == length
        if same and key.get("domains", []) == sorted(set(domains)) and counts["tokens"]:
            share = counts["supervised"] / counts["tokens"]
            return Amount(counts["tokens"], share, f"packed in '{header.parent}'")
    return None


def estimated_amount(
    path: str, limit: int, answer_tokens: int, supervised: float, length: int
) -> Amount:
    """An upper bound: every prompt of the data has an answer of `answer_tokens`, which are the
    share `supervised` of its conversation. path, limit: data.path and data.limit. length: the
    longest conversation, in tokens."""
    rows, said = limit, f"data.limit={limit:,}"
    if not limit:
        found = rows_of(Path(path))
        rows = found or ASSUMED_ROWS
        said = f"{rows:,} prompts in {path}" if found else f"{rows:,} prompts assumed (data.limit)"
    each = min(round(answer_tokens / supervised), length)
    return Amount(
        rows * each,
        supervised,
        f"at most, as nothing is generated yet: {said} x {each:,} tokens "
        f"(sampling.max_new_tokens={answer_tokens:,}, plan.supervised={supervised:g} of the "
        f"tokens, no more than {length:,}); plan.tokens sets it",
    )


def rows_of(path: Path) -> int:
    """Rows of a local file; 0 if the number is not known at once."""
    if path.suffix == ".jsonl" and path.is_file():
        with path.open("rb") as lines:
            return sum(bool(line.strip()) for line in lines)
    if path.suffix == ".parquet" and path.is_file():
        with readable(path, "Check the file."):
            return int(parquet.read_metadata(path).num_rows)
    return 0
