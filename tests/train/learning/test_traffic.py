"""What a cycle learns from: no client beyond its share, prompts on one side each, the newest
answers within the budget."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from inference.server.samples import batch_files, batches
from inference.verifications import RECORDS, VERIFICATIONS, read_table
from tests.train.learning.traffic import prepare
from train.learning.config import LearnConfig
from train.learning.traffic import (
    MEASURING,
    TRAIN_SIDE,
    VALIDATION,
    choose,
    client_limit,
    largest_share,
    read_samples,
    side_of,
    split,
    write_cycle,
)


def rows(counts: dict[str, int], tokens: int = 10) -> list[dict[str, Any]]:
    """So many answers of each client, mixed."""
    found = [
        {
            "sequence": f"{client}-{n}",
            "client": client,
            "answer_length": tokens,
            "prompt_length": 2,
            "tokens": [len(client), n % 50, *range(tokens)],
            "domain": "d",
        }
        for client, count in counts.items()
        for n in range(count)
    ]
    return sorted(found, key=lambda row: row["sequence"].split("-")[1])


def tokens_of(chosen: list[dict[str, Any]]) -> Counter[str]:
    found = Counter[str]()
    for row in chosen:
        found[row["client"]] += row["answer_length"]
    return found


@pytest.mark.parametrize("honest", [1, 3, 9, 40])
def test_a_client_that_sends_garbage_at_a_high_rate_gets_no_more_than_its_share(
    honest: int,
) -> None:
    counts = {f"client {n}": 20 for n in range(honest)} | {"garbage": 5000}
    share, taken = 0.25, tokens_of(choose(rows(counts), 0.25, 10**9))
    allowed = max(share, 1 / (honest + 1)) * sum(taken.values())
    assert taken["garbage"] <= allowed + 10  # one answer more at most
    assert all(taken[f"client {n}"] == 200 for n in range(honest))  # and nobody else gets less


@pytest.mark.parametrize("tokens", [[5], [5, 5], [1, 100], [30, 7, 900, 41], [0, 3]])
@pytest.mark.parametrize("share", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("most", [3, 50, 10**6])
def test_the_limit_is_the_largest_that_holds(tokens: list[int], share: float, most: int) -> None:
    allowed = max(share, 1 / len(tokens))

    def holds(limit: int) -> bool:
        taken = sum(min(count, limit) for count in tokens)
        return limit <= allowed * taken + 1e-9 and taken <= most

    by_hand = [limit for limit in range(1, max(tokens) + 1) if holds(limit)]
    unlimited = sum(tokens) <= most and max(tokens) <= allowed * sum(tokens)
    expected = max(tokens) if unlimited else max(by_hand, default=1)
    assert client_limit(tokens, share, most) == expected


def test_the_newest_answers_are_taken_within_the_budget() -> None:
    given = rows({"a": 30, "b": 30})
    chosen = choose(given, 1.0, 200)
    assert 200 <= sum(tokens_of(chosen).values()) <= 220
    assert chosen == [row for row in given if row in chosen]  # in order
    newest = [row["sequence"] for row in given if row["client"] == "a"][-10:]
    assert [row["sequence"] for row in chosen if row["client"] == "a"] == newest


def test_the_budget_holds_with_any_number_of_clients() -> None:
    given = rows({f"client {n}": 3 for n in range(50)})
    chosen = choose(given, 0.25, 205)
    assert sum(tokens_of(chosen).values()) == 200 and chosen[-1] == given[-1]


def test_equal_prompts_are_on_one_side_and_each_is_held_out_once() -> None:
    config = LearnConfig(held_out=0.4)
    given = rows({"a": 100, "bb": 100, "ccc": 100})
    found = split(given, config)
    held = {prompt.tokens for prompts in found.held_out.values() for prompt in prompts}
    trained = {tuple(row["tokens"][:2]) for row in found.train}
    assert found.usable and held and not held & trained
    assert len(held) == sum(len(prompts) for prompts in found.held_out.values())
    sides = Counter(side_of([1, n], config) for n in range(2000))
    assert abs(sides[TRAIN_SIDE] / 2000 - 0.6) < 0.05
    assert abs(sides[VALIDATION] - sides[MEASURING]) < 100
    few = split(given, replace(config, held_out_prompts=3))
    assert {len(prompts) for prompts in few.held_out.values()} == {3}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(tmp_path_factory.mktemp("place"))


def test_a_cycle_gets_the_verifications_of_its_answers_alone(place: Path, tmp_path: Path) -> None:
    sampled = read_samples(place / "traffic")
    totals = sampled.totals()
    assert totals.answers == 60 and totals.passes > 60 and 1 < totals.tau < 4
    parts = split(choose(sampled.sequences, 0.25, 400), LearnConfig(held_out=0.4))
    write_cycle(place / "traffic", sampled, parts, tmp_path)
    names = {row["sequence"] for row in parts.train}
    found = set(read_table(tmp_path / RECORDS, VERIFICATIONS)["sequence"].to_pylist())
    assert found == names and len(names) < 60
    assert 0.2 < largest_share(sampled.sequences) < 0.35


def test_batches_that_are_damaged_or_go_meanwhile_are_left_out(place: Path, tmp_path: Path) -> None:
    for path in (place / "traffic").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (name,) = batches(tmp_path)
    assert read_samples(tmp_path).names == [name] and not read_samples(tmp_path, name).names
    batch_files(tmp_path, name)[1].write_bytes(b"damaged")
    assert not read_samples(tmp_path).names
    batch_files(tmp_path, name)[1].unlink()
    assert not read_samples(tmp_path).names
