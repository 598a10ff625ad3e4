"""Comparisons over seeds and prompts: ratios of sums, paired prompts, what is kept is not made
again."""

from __future__ import annotations

import argparse
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from heads.api.errors import UserError
from inference.manifest import write_json
from inference.measure.metrics import Totals
from scripts.evidence import small_targets
from scripts.evidence.common import settings_of
from scripts.evidence.small_targets import (
    EXPERIMENT,
    Bench,
    Place,
    begin,
    compared,
    decisive,
    digest,
    put_rows,
    save,
)
from scripts.tools.common import TARGET, VALIDATION
from tests.scripts.evidence.places import micro_place


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


def test_paired_seeds_are_drawn_together() -> None:
    """Sides whose seeds differ in the same way have a ratio without an interval."""
    passes = [10.0] * 4
    mine = [totals([10 * (1 + 2 * gain)] * 4, passes) for gain in (0.5, 1.0, 1.5)]
    other = [totals([10 * (1 + gain)] * 4, passes) for gain in (0.5, 1.0, 1.5)]
    paired, apart = compared(mine, other, paired=True), compared(mine, other)
    assert paired["ratio"] == apart["ratio"] == pytest.approx(2.0)
    assert paired["ratio_ci95"] == pytest.approx([2.0, 2.0])
    assert apart["ratio_ci95"][0] < 1.9 and apart["ratio_ci95"][1] > 2.1


def test_what_decides_a_training_has_all_defaults() -> None:
    """A default that changes changes the key; settings that only show or keep things do not."""
    first = settings_of("train", EXPERIMENT, "head=medusa")
    key = digest(decisive(first))
    assert decisive(first)["optim"]["momentum"] == first.optim.momentum
    assert digest(decisive(settings_of("train", EXPERIMENT, "head=medusa", "train.keep=3"))) == key
    other = "float32" if first.engine.precision == "bfloat16" else "bfloat16"
    changed = [
        settings_of("train", EXPERIMENT, "head=medusa", "head.num_heads=2"),
        first.put(optim=replace(first.optim, momentum=0.9)),
        first.put(schedule=replace(first.schedule, warmup=0.1)),
        first.put(features=replace(first.features, format="int8")),
        first.put(engine=replace(first.engine, precision=other)),
    ]
    keys = {digest(decisive(other)) for other in changed}
    assert len(keys) == len(changed) and key not in keys


def test_rows_of_other_settings_are_refused(tmp_path: Path) -> None:
    given = argparse.Namespace(out=tmp_path / "report", prompts=48, command="c")
    settings = {"seeds": (0, 1), "rates": (0.1,)}
    content = begin(given, settings)
    put_rows(content, [{"name": "a"}], ("name",))
    save(given, content, settings, lambda found: [f"{len(found['rows'])} rows"])
    assert begin(given, settings)["rows"] == [{"name": "a"}]
    with pytest.raises(UserError, match=r"measured with seeds \[0, 1\] \(now \[0\]\)"):
        begin(given, {**settings, "seeds": (0,)})
    with pytest.raises(UserError, match=r"prompts 48 \(now 8\)"):
        begin(argparse.Namespace(**{**vars(given), "prompts": 8}), settings)
    with pytest.raises(UserError, match="another --out"):
        save(given, content, {**settings, "rates": (0.2,)}, lambda _: [])


def test_a_store_serves_what_it_holds_and_the_disk_has_room_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place = micro_place(tmp_path)
    bench = Bench(place, tmp_path / "work", 1, 2, ["eagle3"])
    made: list[tuple[str, ...]] = []
    monkeypatch.setattr(small_targets, "run_on_target", lambda *words, **_: made.append(words))

    def features(*words: str) -> list[str]:
        return bench.features(settings_of("train", EXPERIMENT, *words), place.answers)

    first = features("head=eagle3")
    assert first[:2] == ["features=store", "features.format=fp32"]
    assert features("head=eagle3", "optim.lr=1e-4") == first
    assert len(made) == 1  # one store for all trainings
    assert features("head=eagle3", "head.taps=[0]") == []  # which the store does not hold
    assert features("head=eagle3", "features.format=int8")[1] == "features.format=int8"
    assert features("head=eagle3", "train.sequence_length=256")[2] != first[2]
    assert len(made) == 3
    usage = shutil.disk_usage(tmp_path)._replace(free=small_targets.RESERVE_BYTES)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    assert features("head=eagle3") == first  # it is there
    assert features("head=eagle3", "train.sequence_length=128") == []
    assert "has no room" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"has no room .* features\.format=int4 needs it"):
        features("head=eagle3", "features.format=int4")


def test_missing_answers_are_named_with_the_command_that_makes_them(tmp_path: Path) -> None:
    place = Place(TARGET, tmp_path / "none", VALIDATION, VALIDATION)
    with pytest.raises(UserError, match=r"no answers in .*none.*headstart generate"):
        Bench(place, tmp_path, 1, 2)
