"""Evidence about an acceptance: against the formula written out, monotone, never too sure of what
is true."""

from __future__ import annotations

import copy
import json
from dataclasses import asdict
from math import log
from pathlib import Path

import numpy as np
import pytest

from heads.api.errors import UserError
from inference.measure.answers import FINAL_FILE, Record
from inference.staleness.evidence import (
    EDGE,
    SHARES,
    STEP,
    Bets,
    Grid,
    RatioEvidence,
    Sums,
    interval,
    ratio,
    shift_below,
)
from inference.staleness.reference import from_report
from tests.inference.example_report import REPORT
from tests.inference.staleness.answers import DEPTH, MOST, acceptance, draw

GRID = Grid(DEPTH)


def slow(answers: list[tuple[int, int]], s: float) -> tuple[float, float]:
    """The two e-values of the module's docstring, one gambler and one answer at a time."""
    below = above = 0.0
    for share in SHARES:
        low = high = 1.0
        for accepted, passes in answers:
            low *= 1.0 - share * (accepted - s * passes) / (MOST * (DEPTH - s))
            high *= 1.0 + share * (accepted / s - passes) / MOST
        below += low / len(SHARES)
        above += high / len(SHARES)
    return log(below), log(above)


def test_bets_are_the_product_of_their_stakes() -> None:
    answers = draw(np.random.default_rng(0), 0.6, 25)
    bets = Bets(GRID, MOST, answers)
    for place in (100, 300, len(GRID.values) - 20):
        s = float(GRID.values[place])
        assert s < (1.0 - EDGE) * DEPTH
        below, above = slow(answers, s)
        assert bets.below()[place + 1] == pytest.approx(below, abs=1e-9)
        assert bets.above()[place] == pytest.approx(above, abs=1e-9)
    assert bets.passes == sum(n for _, n in answers)
    backwards = Bets(GRID, MOST, reversed(answers))
    np.testing.assert_allclose(backwards.below(), bets.below(), atol=1e-9)


@pytest.mark.parametrize("chance", [0.0, 0.3, 0.9])
def test_evidence_is_monotone_and_finite_whatever_the_answers(chance: float) -> None:
    answers = draw(np.random.default_rng(1), chance, 40, 0.3)
    extreme = [(0, MOST), (DEPTH * MOST, MOST), (0, 0), (0, 1)]
    kinds: list[RatioEvidence] = [
        Bets(GRID, MOST, answers),
        Bets(GRID, MOST, [*answers, *extreme, *extreme]),
    ]
    kinds.append(Sums(GRID, 100.0, 90.0, 3.0, 90.0))
    for evidence in kinds:
        below, above = evidence.below(), evidence.above()
        assert np.isfinite(below).all() and np.isfinite(above[:-1]).all()
        assert (np.diff(below) >= -1e-9).all() and (np.diff(above) <= 1e-9).all()


def test_the_mean_evidence_against_the_truth_is_at_most_one() -> None:
    rng = np.random.default_rng(2)
    pool = draw(rng, 0.55, 3000)
    place = int(np.searchsorted(GRID.values, acceptance(pool)))
    low, high = [], []
    for _ in range(600):
        bets = Bets(GRID, MOST, [pool[i] for i in rng.integers(0, len(pool), 30)])
        low.append(np.exp(bets.below()[place]))  # the point below the truth
        high.append(np.exp(bets.above()[place]))  # the point above it
    for values in (low, high):
        assert np.mean(values) - 3 * np.std(values) / np.sqrt(len(values)) <= 1.0


def test_intervals_hold_the_truth_at_every_look_and_narrow() -> None:
    rng = np.random.default_rng(3)
    pool = draw(rng, 0.5, 2000)
    truth, missed, widths = acceptance(pool), 0, []
    for _ in range(60):
        bets, held = Bets(GRID, MOST), True
        for place, index in enumerate(rng.integers(0, len(pool), 240)):
            bets.add(*pool[index])
            if place % 20 == 19:
                low, high = interval(bets, GRID, 0.05)
                held &= low <= truth <= high
        missed += not held
        widths.append(high - low)
    assert missed <= 6  # 5% are allowed; far fewer are expected
    assert np.mean(widths) < 0.45 * truth


def test_totals_tell_what_the_normal_mixture_tells() -> None:
    passes, spread = 2000.0, 4.0
    found = interval(Sums(GRID, 1.3 * passes, passes, spread, passes), GRID, 0.05)
    error = (spread / passes) ** 0.5
    assert 1.3 - 4.0 * error < found[0] < 1.3 - 1.96 * error
    assert 1.3 + 1.96 * error < found[1] < 1.3 + 4.0 * error


def test_shifts_are_ratios() -> None:
    assert ratio(shift_below(0.95)) <= 0.95 < ratio(shift_below(0.95) + 1)
    assert ratio(shift_below(1.0)) == 1.0
    values = GRID.values
    assert values[-1] == DEPTH and values[1] / values[0] == pytest.approx(1.0 + STEP)


def test_a_measurement_gives_the_prompts_that_a_watch_decodes(tmp_path: Path) -> None:
    """Not the further turns of a conversation, nor prompts behind others."""
    content, place = copy.deepcopy(REPORT), tmp_path / "report.json"
    content["run"]["prompts"] = {"domains": dict.fromkeys(("a", "a/2", "b/2"), "chat")}
    place.write_text(json.dumps(content), encoding="utf-8")
    passes = {"a": (2, 1), "a/2": (4, 4), "b/2": (0,)}  # the last one is no turn of another
    records = [
        asdict(Record("eagle3", name, 0, [1], [(kept, kept + 1, True) for kept in own], {}))
        for name, own in passes.items()
    ]
    lines = [json.dumps(one) for one in ({"fingerprint": "x"}, *records)]
    (tmp_path / FINAL_FILE).write_text("\n".join(lines) + "\n", encoding="utf-8")
    assert from_report(place, "a" * 64).tallies["chat"].answers == [[2, 1], [0]]
    content["run"]["bench"] = {"contexts": [512]}
    place.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(UserError, match=r"measured with bench\.contexts=\[512\]"):
        from_report(place, "a" * 64)
