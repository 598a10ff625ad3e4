"""The report on answers and tau: known curves are told as they are, arms are placed on them, and the
command runs on the smallest target, again from what is kept."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from heads.api.errors import UserError
from inference.measure.metrics import Totals
from scripts.evidence import answer_sets, data_efficiency, small_targets
from scripts.evidence.data_efficiency import (
    ARMS,
    Found,
    Measured,
    Trained,
    drop_other_recipe,
    found_in,
    markdown,
    require_same_sizes,
    summary,
)
from scripts.evidence.small_targets import PLACES
from tests.scripts.evidence.places import micro_place

SIZES = [1_000, 3_000, 10_000, 30_000]


def drafters(tau: float) -> list[Totals]:
    """Three drafters that have one tau on all prompts but for a factor of each prompt and seed."""
    random = np.random.default_rng(1)
    passes = random.integers(20, 60, 48).astype(float)
    found = []
    for factor in np.linspace(0.97, 1.03, 3):
        gain = (tau - 1) * factor * random.uniform(0.9, 1.1, len(passes))
        nothing = np.zeros(len(passes))
        names = [str(number) for number in range(len(passes))]
        sums = (passes * (1 + gain), passes, nothing, nothing, np.zeros((len(passes), 1)))
        found.append(Totals(names, ["one"] * len(names), *sums, seconds={}))
    return found


def trained(answers: int, tau: float, tokens: float, first: int = 0) -> Measured:
    """Three trainings with the seeds from `first`."""
    about = (int(tokens) // 1000, int(tokens))
    found = enumerate(drafters(tau), first)
    return Measured(answers, {seed: Trained(*about, totals) for seed, totals in found})


def growing(size: float) -> float:
    """tau of a power law."""
    return 1 + 0.1 * size**0.25


def bounded(size: float) -> float:
    """tau below 3.5."""
    return 1 + 2.5 - 30 * size**-0.5


def found_on(curve: Any, **arms: Measured) -> Found:
    points = {size: trained(size, curve(size), 340.0 * size) for size in SIZES}
    return Found(points, arms)


def test_a_power_law_and_what_its_doublings_bring() -> None:
    entry = summary("eagle3", found_on(growing), SIZES)
    assert entry["form"] == "power"
    rate, (low, high) = entry["fits"]["power"]["rate"], entry["fits"]["power"]["rate_ci95"]
    assert rate == pytest.approx(0.25, abs=0.01)
    assert low < rate < high
    assert [one["answers"] for one in entry["doublings"]] == SIZES
    for one in entry["doublings"]:
        assert one["factor"] == pytest.approx(2**0.25, abs=0.01)
        assert one["factor_ci95"][0] < one["factor"] < one["factor_ci95"][1]


def test_a_curve_that_saturates_has_a_limit_and_smaller_doublings() -> None:
    entry = summary("eagle3", found_on(bounded), SIZES)
    assert entry["form"] == "saturating"
    assert entry["fits"]["saturating"]["limit_of_tau"] == pytest.approx(3.5, abs=0.1)
    factors = [one["factor"] for one in entry["doublings"]]
    assert factors == sorted(factors, reverse=True)
    assert factors[0] == pytest.approx((bounded(2_000) - 1) / (bounded(1_000) - 1), abs=0.02)


@pytest.mark.parametrize(("curve", "close"), [(growing, 0.03), (bounded, 0.12)])
def test_arms_are_placed_where_the_sizes_have_their_tau(curve: Any, close: float) -> None:
    """Between sizes by a power law, which a bounded curve is not."""
    arms = {
        "flattest": trained(3_000, curve(6_000), 340.0 * 3_000),
        "repeated": trained(1_000, curve(1_500), 340.0 * 3_000),
        "rounds": trained(3_000, curve(3_000), 340.0 * 1_500),
        "branches": trained(3_000, 9.0, 340.0 * 3_000),
    }
    entry = summary("eagle3", found_on(curve, **arms), SIZES)
    found = entry["arms"]
    assert found["flattest"]["worth"] == pytest.approx(6_000, rel=close)
    assert found["flattest"]["worth_ratio"] == pytest.approx(2, rel=close)
    low, high = found["flattest"]["worth_ratio_ci95"]
    assert low < found["flattest"]["worth_ratio"] < high
    assert found["repeated"]["worth_ratio"] == pytest.approx(0.5, rel=close)
    assert found["repeated"]["ratio"] == pytest.approx(
        (curve(1_500) - 1) / (curve(3_000) - 1), rel=0.02
    )
    assert found["rounds"]["as_many_tokens"] == pytest.approx(1_500)
    assert found["rounds"]["worth_ratio"] == pytest.approx(2, rel=0.03)  # at a size
    assert found["branches"]["worth"] == 10 * SIZES[-1]
    assert found["repeated"]["way"] == "1,000 answers, passed more often"


def test_the_page_shows_a_kind_whatever_is_known_of_it() -> None:
    settings = {"pool": 30_000, "passes": 2, "depth": 7, "prompts": 48, "beyond": 10}
    content: dict[str, Any] = {"settings": settings, "command": "a command", "kinds": {}}
    one = Found({1_000: trained(1_000, 1.5, 3.4e5)})
    content["kinds"]["first"] = summary("eagle3", one, SIZES)
    page = "\n".join(markdown(content))
    assert "| first | 1,000 | 3 | 340 | 340,000 | 1.5" in page and page.count("| first |") == 1
    arms = {"repeated": trained(1_000, growing(1_500), 1.02e6)}
    content["kinds"]["first"] = summary("eagle3", found_on(growing, **arms), SIZES)
    page = "\n".join(markdown(content))
    assert page.count("| first |") == len(SIZES) + 2 + 1
    assert "| first | **power** | 0.25 [" in page
    assert "| first | 1,000 answers, passed more often | 3 | 1,000 | 1,020,000 |" in page
    assert "Made by `a command`" in page and "larger sets" not in page
    settings["pool"] = SIZES[-1] - 1
    assert "the embedded target (larger sets: and others, " in "\n".join(markdown(content))


def test_what_a_report_holds_is_found_again() -> None:
    """Fits and arms of a later command are those of one command, also from a part of the sizes."""
    arms = {"repeated": trained(1_000, growing(1_500), 1.02e6)}
    whole = found_on(growing, **arms)
    entry = json.loads(json.dumps(summary("eagle3", whole, SIZES)))
    kept = found_in(entry)
    again = summary("eagle3", kept, SIZES)
    assert json.loads(json.dumps(again)) == entry
    kept.curve[1_000] = whole.curve[1_000]  # measured again, after the others
    assert json.loads(json.dumps(summary("eagle3", kept, SIZES))) == entry


def test_other_seeds_join_those_of_a_report_and_equal_ones_replace_them() -> None:
    whole = trained(1_000, 2.0, 3.4e5)
    kept = found_in(json.loads(json.dumps(summary("eagle3", Found({1_000: whole}), SIZES))))
    others = trained(1_000, 3.0, 3.8e5, first=2)
    both = others.joined(kept.curve[1_000])
    assert [*both.by_seed] == [0, 1, 2, 3, 4]
    assert [one.steps for one in both.by_seed.values()] == [340, 340, 380, 380, 380]
    assert (both.steps, both.tokens) == (364, 364_000)
    (row,) = summary("eagle3", Found({1_000: both}), SIZES)["points"]
    assert 2.0 < row["tau"] < 3.0 and len(row["seeds"]) == 5
    again = found_in(json.loads(json.dumps({"points": [row]}))).curve[1_000]
    assert summary("eagle3", Found({1_000: again}), SIZES)["points"] == [row]


def test_an_arm_that_lies_between_two_sizes_lies_there_whatever_the_curve() -> None:
    """A fit that misses a size would place an arm below it above it."""
    taus = {1_000: 3.91, 3_000: 4.52, 10_000: 4.81}
    points = {size: trained(size, tau, 340.0 * size) for size, tau in taus.items()}
    found = Found(points, {"repeated": trained(1_000, 4.39, 340.0 * 3_000)})
    entry = summary("eagle3", found, [*taus])
    row = entry["arms"]["repeated"]
    assert row["ratio"] < 1 and row["worth_ratio"] < 1
    assert row["worth"] == pytest.approx(
        1_000 * 3 ** (np.log(3.39 / 2.91) / np.log(3.52 / 2.91)), rel=0.02
    )


def test_results_of_another_recipe_are_left_out() -> None:
    kept = found_in(summary("eagle3", found_on(growing), SIZES))
    kept.curve[1_000] = replace(kept.curve[1_000], recipe="of another")
    kept.curve[3_000] = replace(kept.curve[3_000], recipe="of today")
    assert drop_other_recipe(kept, "of today") == 1
    assert [*kept.curve] == SIZES[1:]  # the others are of an earlier version, which named none
    entry = json.loads(json.dumps(summary("eagle3", kept, SIZES[1:])))
    assert found_in(entry).curve[3_000].recipe == "of today"


def test_arms_between_other_sizes_are_refused(tmp_path: Path) -> None:
    arms = {"repeated": trained(1_000, growing(1_500), 1.02e6)}
    kinds = {"eagle3": summary("eagle3", found_on(growing, **arms), SIZES)}
    require_same_sizes(tmp_path / "report", kinds, [*SIZES, 60_000])
    with pytest.raises(UserError, match=r"sizes \[1000, 3000\], .* would be \[500, 1000\]"):
        require_same_sizes(tmp_path / "report", kinds, [500, *SIZES])


@pytest.mark.slow
def test_a_command_with_fewer_sizes_and_arms_keeps_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Known:
        """Results without trainings."""

        def __init__(self, *given: object) -> None: ...

        def recipe(self, kind: str) -> str:
            return ""

        def point(self, kind: str, size: int, seeds: object) -> Measured:
            return trained(size, growing(size), 340.0 * size)

        def arm(self, kind: str, arm: str, seeds: object) -> Measured:
            return trained(1_000, growing(1_500), 340.0 * 3_000)

    monkeypatch.setattr(data_efficiency, "Study", Known)
    monkeypatch.setattr(data_efficiency, "require_answers", lambda _: None)
    monkeypatch.setattr(data_efficiency, "answers_facts", lambda _: {})
    out = tmp_path / "report"
    words = ["--kinds", "eagle3", "--out", str(out), "--seeds", "0"]
    assert data_efficiency.main([*words, "--sizes", *map(str, SIZES)]) == 0
    whole = json.loads(out.with_suffix(".json").read_text())["kinds"]["eagle3"]
    assert data_efficiency.main([*words, "--sizes", "3000", "--arms", "rounds"]) == 0
    content = json.loads(out.with_suffix(".json").read_text())
    assert content["kinds"]["eagle3"] == whole
    assert [*whole["arms"]] == [*ARMS] and len(whole["points"]) == 4
    assert data_efficiency.main([*words, "--sizes", "500"]) == 2  # below the arms' sizes
    assert data_efficiency.main([*words, "--sizes", "3000", "--pool", "20000"]) == 2


@pytest.mark.slow
def test_the_command_on_the_smallest_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PLACES, "embedded", micro_place(tmp_path))
    monkeypatch.setattr(data_efficiency, "DEPTH", 2)
    monkeypatch.setattr(data_efficiency, "BRANCHED_DEPTH", 2)
    out = tmp_path / "report"
    words = ["--kinds", "eagle3", "--sizes", "6", "12", "18", "--seeds", "0", "--pool", "20"]
    words += ["--prompts", "1", "--threads", "1", "--work", str(tmp_path / "work")]
    words += ["--out", str(out)]
    assert data_efficiency.main(words) == 0
    content = json.loads(out.with_suffix(".json").read_text())
    assert "--sizes 6 12 18" in content["command"]
    entry = content["kinds"]["eagle3"]
    assert [row["answers"] for row in entry["points"]] == [6, 12, 18]
    steps = [row["steps"] for row in entry["points"]]
    assert steps == sorted(steps)
    assert [*entry["arms"]] == [*ARMS]
    for name, arm in entry["arms"].items():
        if name != "rounds":  # whose rounds take whole steps each
            assert arm["steps"] == steps[1]
    assert entry["arms"]["repeated"]["answers"] == 6
    assert entry["arms"]["flattest"]["answers"] == 12
    assert entry["arms"]["variations"]["answers"] == 12
    rounds = entry["arms"]["rounds"]
    assert rounds["answers"] == 12  # three rounds of 4 prompts each
    (ended,) = (one["loop"] for one in rounds["seeds"])
    assert ended["best_round"] in range(3)
    stores = [path.name for path in (tmp_path / "work" / "trained").glob("features-*")]
    assert len(stores) == 3  # one for each size
    page = out.with_suffix(".md").read_text()
    assert f"eagle3 in rounds: the drafter of round {ended['best_round']} " in page
    judged = json.loads(next((tmp_path / "work").glob("rounds/*/loop.json")).read_text())
    trained_as = next((tmp_path / "work").glob("rounds/*/round-0/train/*/config.yaml"))
    used = yaml.safe_load(trained_as.read_text())
    assert (used["optim"]["kind"], used["train"]["global_batch"]) == ("muon", 2)  # as the others
    judge = "bench.prompts_per_domain=64"
    assert judge in judged["settings"]["round"]["judge"]

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("done again")

    for module, name in (
        (small_targets, "run_on_target"),
        (small_targets, "decode_totals"),
        (answer_sets, "run_on_target"),
        (data_efficiency, "run_on_target"),
    ):
        monkeypatch.setattr(module, name, refuse)
    assert data_efficiency.main(words) == 0
    assert out.with_suffix(".md").read_text() == page
    assert data_efficiency.main([*words, "--sizes", "0"]) == 2
