"""The tokens of a planned training before anything was generated."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet

from train.planning.amount import ASSUMED_ROWS, estimated_amount, packed_amount, rows_of


def test_the_estimate_is_an_upper_bound_and_says_so(tmp_path: Path) -> None:
    found = estimated_amount("org/data", 1000, 70, 0.7, 4096)
    assert (found.tokens, found.supervised) == (100_000, 0.7)
    assert "at most, as nothing is generated yet: data.limit=1,000 x 100 tokens" in found.source
    assert estimated_amount("org/data", 1000, 70, 0.7, 64).tokens == 64_000  # the longest row
    assert estimated_amount("org/data", 0, 70, 0.7, 4096).tokens == ASSUMED_ROWS * 100
    file = tmp_path / "prompts.jsonl"
    file.write_text("{}\n{}\n\n{}\n")
    counted = estimated_amount(str(file), 0, 70, 0.7, 4096)
    assert counted.tokens == 300
    assert f"3 prompts in {file}" in counted.source
    parquet.write_table(pa.table({"x": [1, 2]}), tmp_path / "rows.parquet")
    assert rows_of(tmp_path / "rows.parquet") == 2
    assert rows_of(tmp_path / "nothing.jsonl") == 0


def test_packed_answers_count_where_the_rows_are_as_long(tmp_path: Path) -> None:
    folder = tmp_path / "packed" / "one"
    folder.mkdir(parents=True)
    header = {"key": {"sequence_length": 64}, "counts": {"tokens": 100, "supervised": 25}}
    (folder / "packed.json").write_text(json.dumps(header))
    found = packed_amount(tmp_path, 64)
    assert found is not None
    assert (found.tokens, found.supervised) == (100, 0.25)
    assert packed_amount(tmp_path, 128) is None
