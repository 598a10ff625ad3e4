"""Comparisons over seeds and prompts: ratios of sums, paired prompts, what is kept is not made
again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from heads.api.errors import UserError
from inference.manifest import write_json
from inference.measure.metrics import Totals
from scripts.evidence.small_targets import Bench, Place, compared
from scripts.tools.common import TARGET, VALIDATION


def totals(committed: list[float], passes: list[float]) -> Totals:
    count = len(committed)
    nothing = np.zeros(count)
    return Totals(
        [str(index) for index in range(count)],
        ["one"] * count,
        np.array(committed),
        np.array(passes),
        nothing,
        nothing,
        np.zeros((count, 1)),
        {},
    )


def test_tau_is_a_ratio_of_sums_over_seeds_and_prompts() -> None:
    ours = [totals([30, 60], [10, 30]), totals([30, 30], [10, 10])]
    theirs = [totals([20, 20], [10, 10])]
    found = compared(ours, theirs)
    assert found["ours"]["tau"] == pytest.approx(150 / 60)
    assert found["theirs"]["tau"] == pytest.approx(2.0)
    assert found["ratio"] == pytest.approx(1.5)
    low, high = found["ratio_ci95"]
    assert low < 1.5 < high


def test_the_same_prompts_are_drawn_on_both_sides() -> None:
    """A side that is twice as good on every prompt is so in every resample."""
    random = np.random.default_rng(0)
    passes = random.integers(5, 50, 12).astype(float)
    gain = random.uniform(0.1, 3.0, 12)
    worse = totals(list(passes * (1 + gain)), list(passes))
    better = totals(list(passes * (1 + 2 * gain)), list(passes))
    found = compared([better], [worse])
    assert [found["ratio"], *found["ratio_ci95"]] == pytest.approx([2.0, 2.0, 2.0])
    low, high = found["ours"]["tau_ci95"]
    assert high - low > 0.1


def test_a_training_is_done_once_and_again_after_an_interruption(tmp_path: Path) -> None:
    place = Place(TARGET, tmp_path, VALIDATION, VALIDATION)
    bench, calls = Bench(place, tmp_path / "work", 1, 2), []

    def train(out: Path) -> dict[str, int]:
        calls.append(out)
        write_json(out / "weights.json", len(calls))
        if len(calls) == 1:
            raise KeyboardInterrupt
        return {"steps": 7}

    with pytest.raises(KeyboardInterrupt):
        bench.once("a", ["key"], train)
    checkpoint = bench.once("a", ["key"], train)
    assert bench.once("a", ["key"], train) == checkpoint
    assert len(calls) == 2
    assert bench.facts(checkpoint) == {"steps": 7}
    assert bench.once("a", ["another"], train) != checkpoint
    assert len(calls) == 3


def test_missing_answers_are_named_with_the_command_that_makes_them(tmp_path: Path) -> None:
    place = Place(TARGET, tmp_path / "none", VALIDATION, VALIDATION)
    with pytest.raises(UserError, match=r"no answers in .*none.*headstart generate"):
        Bench(place, tmp_path, 1, 2)
