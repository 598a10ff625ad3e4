"""The report on ablations, on the smallest target: its rows, what it keeps, what it trains again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from heads.api.errors import UserError
from heads.api.registry import get_kind
from scripts.assets import held_out_target
from scripts.config.schema import load_settings
from scripts.config.stages import STAGES
from scripts.evidence import ablations, small_targets
from scripts.evidence.ablations import RECIPE, STUDIES, arms_of, drop_other_recipe, words_of
from scripts.evidence.small_targets import EXPERIMENT, PLACES, decisive
from scripts.tools.common import cpu_target
from tests.scripts.evidence.places import micro_place


@pytest.mark.parametrize(
    "study",
    [pytest.param(study, marks=[] if study == "peagle" else pytest.mark.slow) for study in STUDIES],
)
def test_every_arm_composes_and_changes_its_recipe(study: str) -> None:
    info, arms = cpu_target().info, STUDIES[study]
    assert next(iter(arms)) == RECIPE
    settings = {
        arm: load_settings(STAGES["train"], [EXPERIMENT, *words_of(study, arm, info.num_layers)])
        for arm in arms
    }
    recipe = decisive(settings[RECIPE])
    for arm, found in settings.items():
        assert found.choices["head"] == study
        assert (decisive(found) == recipe) == (arm == RECIPE), arm
        with torch.device("meta"):
            get_kind(found.head.kind).drafter_class(found.head.config, info)


def test_taps_of_the_arms_exist_in_the_second_target() -> None:
    layers = held_out_target.CONFIG["num_hidden_layers"]
    found = {
        word
        for study, arms in STUDIES.items()
        for arm in arms
        for word in words_of(study, arm, layers)
        if word.startswith("head.taps=")
    }
    assert len(found) > 2
    for word in found:
        taps = json.loads(word.removeprefix("head.taps="))
        assert taps == sorted({*taps}) and all(0 < tap < layers for tap in taps)


def test_named_arms_stand_beside_the_recipe() -> None:
    assert arms_of("eagle3", []) == [*STUDIES["eagle3"]]
    assert arms_of("eagle3", ["one_tap", "adamw"]) == [RECIPE, "adamw", "one_tap"]
    assert arms_of("eagle3", [RECIPE]) == [RECIPE]
    with pytest.raises(UserError, match=r"--arms block_16: the study eagle3 has no such arm"):
        arms_of("eagle3", ["adamw", "block_16"])


def test_a_rate_takes_the_place_of_the_recipes_and_not_of_an_arms() -> None:
    recipe = words_of("eagle3", RECIPE, 20, 0.01)
    assert recipe[-1] == "optim.lr=0.01"
    assert words_of("eagle3", "rate_5e-3", 20, 0.01) == [*recipe, "optim.lr=5e-3"]
    assert words_of("eagle3", RECIPE, 20) == recipe[:-1]


def test_rows_beside_another_recipe_are_dropped() -> None:
    def row(target: str, arm: str, *overrides: str) -> dict[str, Any]:
        return {"target": target, "study": "eagle3", "arm": arm, "overrides": [*overrides]}

    rows = [row(at, arm, "a", arm) for at in ("one", "two") for arm in (RECIPE, "slow")]
    content = {"rows": rows}
    drop_other_recipe(content, row("one", "slow", "b", "slow"))
    drop_other_recipe(content, row("one", RECIPE, "a", RECIPE))
    assert content["rows"] == rows
    drop_other_recipe(content, row("one", RECIPE, "b", RECIPE))
    assert content["rows"] == rows[2:]
    # the same overrides of other defaults, or of other answers; rows without a digest are earlier
    digested = [{**one, "recipe": "first"} for one in rows]
    content = {"rows": [*digested]}
    drop_other_recipe(content, digested[0])
    assert content["rows"] == digested
    drop_other_recipe(content, {**rows[0], "recipe": "second"})
    assert content["rows"] == digested[2:]


@pytest.mark.slow
def test_the_report_on_the_smallest_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PLACES, "embedded", micro_place(tmp_path))
    monkeypatch.setattr(ablations, "DEPTH", 2)
    arms = {RECIPE: ["head=eagle3", "optim.lr=1e-2"], "slow": ["optim.lr=1e-9"]}
    monkeypatch.setitem(STUDIES, "eagle3", arms)
    trained: list[str] = []
    run = small_targets.run_on_target

    def note(stage: str, *given: object, **more: object) -> None:
        trained.append(stage)
        run(stage, *given, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(small_targets, "run_on_target", note)
    written: list[int] = []
    save = small_targets.write_report

    def count(stem: Path, content: dict[str, list[object]], lines: list[str]) -> None:
        written.append(len(content["rows"]))
        save(stem, content, lines)

    monkeypatch.setattr(small_targets, "write_report", count)
    out = tmp_path / "report"
    words = ["--targets", "embedded", "--studies", "eagle3", "--seeds", "0", "--prompts", "1"]
    words += ["--threads", "1", "--work", str(tmp_path / "work"), "--out", str(out)]
    assert ablations.main(words) == 0
    assert trained == ["features", "train", "train"]
    assert written == [1, 2]  # after every arm
    content = json.loads(out.with_suffix(".json").read_text())
    recipe, slow = content["rows"]
    assert (recipe["arm"], slow["arm"]) == (RECIPE, "slow")
    for figures in recipe["figures"].values():  # the recipe against itself
        assert figures["ours"]["tau"] == figures["theirs"]["tau"] >= 1
        assert figures["ratio"] == (1 if figures["ours"]["tau"] > 1 else 0)
    assert slow["overrides"][-1] == "optim.lr=1e-9"
    assert "--studies eagle3" in content["command"]
    page = out.with_suffix(".md").read_text()
    assert f"Made by `{content['command']}`" in page and "| embedded | eagle3 | slow |" in page
    assert ablations.main(words) == 0
    assert len(trained) == 3  # all were kept
    monkeypatch.setitem(arms, "slow", ["optim.lr=1e-8"])
    assert ablations.main(words) == 0
    assert len(trained) == 4  # a changed recipe is trained
    again = json.loads(out.with_suffix(".json").read_text())["rows"]
    assert [row["arm"] for row in again] == [RECIPE, "slow"]
    assert again[1]["overrides"][-1] == "optim.lr=1e-8"
