"""Branches: which refused tokens are gone on from, against a slow and obvious reading of the
records."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from heads.api.errors import UserError
from inference.verifications import VERIFICATIONS, read_table
from tests.models import random_model
from tests.train.feedback.recorded import (
    KIND,
    decoded,
    name_of,
    tokens_of,
    write_answers,
    write_records,
)
from train.data.config import DataConfig
from train.data.sources import Source
from train.feedback.branches import BRANCHES, branches_of, write_branches
from train.feedback.config import FeedbackConfig


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def refused(records: Path, within: int) -> dict[str, float]:
    """Every first error near an answer's begin, by hand: its name -> the target's log-probability
    of the refused token."""
    begins = {name_of(one): len(one.request.tokens) for one in decoded(KIND)}
    # behind an answer's end there is nothing to say
    ends = {one.tokens[-1] for one in decoded(KIND) if one.finish == "stop"}
    found = {}
    for row in read_table(records, VERIFICATIONS).to_pylist():
        at = row["position"] + row["error_depth"]
        if row["error_depth"] and at - begins[row["sequence"]] < within:
            token = row["drafted"][row["error_depth"] - 1]
            if token in ends:
                continue
            found[f"{row['sequence']}/{at}-{token}"] = row["log_p"][row["error_depth"] - 1]
    return found


def log_probability(tokens: list[int]) -> float:
    """Of the last token, by the model's own forward pass."""
    with torch.no_grad():
        logits = random_model()(input_ids=torch.tensor([tokens[:-1]]), use_cache=False).logits[
            0, -1
        ]
    return float(logits.double().log_softmax(-1)[tokens[-1]])


def test_the_likeliest_refused_tokens_are_gone_on_from(
    made: tuple[Path, Path], tmp_path: Path
) -> None:
    answers, records = made
    config = FeedbackConfig(branches=1, branch_likely=0.001, branch_within=12)
    count = write_branches([(answers, records)], tmp_path / BRANCHES, config)
    found = lines_of(tmp_path / BRANCHES)
    possible = {
        name: value for name, value in refused(records, 12).items() if value >= math.log(0.001)
    }
    assert count == len(found) == min(8, len(possible)) and len(possible) > 8
    assert sorted(possible.values(), reverse=True)[:count] == [item["log_p"] for item in found]
    texts = {name_of(one): tokens_of(one) for one in decoded(KIND)}
    for item in found:
        name, _, place = item["id"].rpartition("/")
        at, token = map(int, place.split("-"))
        assert item["tokens"] == [*texts[name][:at], token] and texts[name][at] != token
        assert item["log_p"] == pytest.approx(log_probability(item["tokens"]), abs=1e-4)
        assert possible[item["id"]] == item["log_p"]


def test_limits_are_kept(made: tuple[Path, Path], tmp_path: Path) -> None:
    answers, records = made
    near = FeedbackConfig(branches=9, branch_likely=1e-9, branch_within=3)
    write_branches([(answers, records)], tmp_path / "near", near)
    assert {item["id"] for item in lines_of(tmp_path / "near")} == set(refused(records, 3))
    likely = FeedbackConfig(branches=99, branch_likely=0.01, branch_within=99)
    write_branches([(answers, records)], tmp_path / "likely", likely)
    everything = refused(records, 99)
    assert {item["id"] for item in lines_of(tmp_path / "likely")} == {
        name for name, value in everything.items() if value >= math.log(0.01)
    }


def test_a_branch_begins_with_its_own_document() -> None:
    row: Any = {"id": "r", "domain": "d", "spans": [[2, 4], [7, 10]], "parts": [4]}
    row["tokens"] = [1, 10, 11, 2, 1, 10, 20, 21, 22, 2]
    refused: Any = {"error_depth": 1, "log_p": [-0.5]}
    said: list[Any] = [
        {**refused, "position": 1, "drafted": [33], "pick": 11},
        {**refused, "position": 7, "drafted": [34], "pick": 22},
    ]
    found = branches_of(row, said, FeedbackConfig(branches=1))
    assert [one["tokens"] for one in found] == [[1, 10, 33], [1, 10, 20, 21, 34]]


def test_no_branch_is_written_twice(made: tuple[Path, Path], tmp_path: Path) -> None:
    answers, records = made
    config = FeedbackConfig(branches=1, branch_likely=0.001)
    write_branches([(answers, records)], tmp_path / "first", config)
    write_branches([(answers, records)], tmp_path / "second", config, [tmp_path / "first"])
    first, second = (
        {item["id"] for item in lines_of(tmp_path / name)} for name in ("first", "second")
    )
    assert second and not first & second


def test_records_without_tokens_give_none_and_say_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    completions = decoded(KIND)
    answers = write_answers(tmp_path / "generate", completions)
    records = write_records(answers / "records", completions, KIND, redact=True)
    assert (
        write_branches([(answers, records)], tmp_path / BRANCHES, FeedbackConfig(branches=2)) == 0
    )
    assert (tmp_path / BRANCHES).read_text() == ""
    assert "16 branches were asked for" in caplog.text and "Redacted records" in caplog.text


def test_branches_are_read_by_a_generation(made: tuple[Path, Path], tmp_path: Path) -> None:
    answers, records = made
    write_branches(
        [(answers, records)], tmp_path / BRANCHES, FeedbackConfig(branches=1, branch_likely=0.001)
    )
    data = DataConfig(
        path=str(tmp_path / BRANCHES),
        kind="tokens",
        column="tokens",
        id_column="id",
        domain_column="domain",
    )
    rows = list(Source(data))
    assert [row.tokens for row in rows] == [
        tuple(item["tokens"]) for item in lines_of(tmp_path / BRANCHES)
    ]


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ({"branches": -1}, r"feedback.branches must lie in \[0, "),
        ({"branch_within": 0}, r"feedback.branch_within must lie in \[1, "),
        ({"branch_likely": 0.0}, "feedback.branch_likely must be above 0"),
    ],
)
def test_settings_without_sense_are_refused(wrong: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        FeedbackConfig(**wrong)


def test_answers_to_earlier_branches_are_gone_on_from_too(
    made: tuple[Path, Path], tmp_path: Path
) -> None:
    answers, records = made
    completions = tuple(one for one in decoded(KIND) if one.request.index >= 4)
    first = write_answers(
        tmp_path / "first", tuple(one for one in decoded(KIND) if one.request.index < 4)
    )
    own = write_records(
        first / "records", tuple(one for one in decoded(KIND) if one.request.index < 4), KIND
    )
    second = write_answers(tmp_path / "second", completions)
    others = write_records(second / "records", completions, KIND)
    config = FeedbackConfig(branches=3, branch_likely=1e-6)
    together = write_branches([(first, own), (second, others)], tmp_path / "two", config)
    assert together == 3 * 4  # so many per answer of the first folder, from both
    write_branches([(answers, records)], tmp_path / "one", config)
    likeliest = [item["id"] for item in lines_of(tmp_path / "one")][:12]
    assert [item["id"] for item in lines_of(tmp_path / "two")] == likeliest
