"""The ablation of rounds: every switch trains from one start; those that say what is answered train on their own answers too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from scripts.rounds import GENERATED, HARD, Rounds
from scripts.rounds_plan import PLAIN, TRIALS

from heads.api.errors import UserError
from inference.manifest import file_sha256, read_manifest
from scripts import loop_ablation
from scripts.config import load_settings
from scripts.stages import STAGES
from tests.scripts.loops import micro_loop

MADE = tuple(name for name in GENERATED if name != "variations")
"""A target of random weights ends no prompt of its own, so that it makes no variations."""
SWITCHES = ("replay", *MADE)


@pytest.fixture(scope="module")
def rounds(tmp_path_factory: pytest.TempPathFactory) -> Rounds:
    """Played with the switches above, on a micro target, at a temperature."""
    folder = tmp_path_factory.mktemp("ablation")
    place = [f"run.root={folder}", "run.name=ablation", "sampling.temperature=0.8", "feedback.branch_likely=0.0001"]
    made = loop_ablation.overrides(1)
    found = Rounds(load_settings(STAGES["loop"], [*micro_loop(folder), *made, *place, "loop.round.trial_steps=4"]))
    loop_ablation.ablate(found, SWITCHES)
    return found


def trial(rounds: Rounds, name: str) -> dict[str, Any]:
    return read_manifest(rounds.plan.folder(1) / TRIALS / "train" / name, "train")


def answers(folder: Path) -> dict[str, Any]:
    return read_manifest(folder, "generate")["counts"]


def test_all_trainings_have_one_start_and_as_many_steps(rounds: Rounds) -> None:
    start = rounds.plan.training(0) / read_manifest(rounds.plan.training(0), "train")["checkpoint"]
    for name in (PLAIN, *SWITCHES):
        assert trial(rounds, name)["steps"] == 4
        settings = (rounds.plan.folder(1) / TRIALS / "train" / name / "config.yaml").read_text(encoding="utf-8")
        assert f"init_from: {start}" in settings


def test_what_is_answered_comes_on_top_of_the_rounds_answers(rounds: Rounds) -> None:
    own = answers(rounds.plan.folder(1) / "generate")["done"]
    assert own == 8  # a third of 24 prompts
    for name in MADE:
        more = answers(rounds.plan.folder(1) / name / "generate")["done"]
        read = answers(rounds.plan.folder(1) / TRIALS / f"feedback-{name}")["done"]
        assert 0 < more <= own and read == own + more
    with pytest.raises(UserError, match="gave no variations"):
        loop_ablation.ablate(rounds, ["variations"])


def test_hard_prompts_are_the_dearest_quarter_answered_with_another_seed(rounds: Rounds) -> None:
    folder = rounds.plan.folder(1)
    lines = (folder / HARD / f"{HARD}.jsonl").read_text(encoding="utf-8").splitlines()
    costs = [json.loads(line)["cost"] for line in lines]
    assert 2 <= len(costs) <= 3 and costs == sorted(costs, reverse=True)
    texts = {}
    for place in (folder / "generate", folder / HARD / "generate"):
        shards = [place / entry["file"] for entry in read_manifest(place, "generate")["shards"]]
        texts[place.parent.name] = {row["id"]: row["tokens"] for shard in shards for row in pq.read_table(shard).to_pylist()}
    own, again = texts[folder.name], texts[HARD]
    assert set(again) == {json.loads(line)["id"] for line in lines} <= set(own)
    assert any(own[name] != tokens for name, tokens in again.items())


def test_what_has_been_played_is_left_alone(rounds: Rounds) -> None:
    places = sorted((rounds.plan.folder(1) / TRIALS / "train").glob("*/best/*.safetensors"))
    before = {path: (path.stat().st_mtime_ns, file_sha256(path)) for path in places}
    assert before
    loop_ablation.ablate(rounds, SWITCHES)
    assert {path: (path.stat().st_mtime_ns, file_sha256(path)) for path in places} == before


def test_rows_of_another_start_are_not_mixed() -> None:
    def rows(weights: str, *names: str) -> dict[str, Any]:
        return {name: {"weights_sha256": weights if name == PLAIN else name, "of": weights} for name in (PLAIN, *names)}

    known = rows("a", "replay", "token_weights")
    both = loop_ablation.merged(known, rows("a", HARD))
    assert list(both) == [PLAIN, "token_weights", "replay", HARD]
    assert list(loop_ablation.merged(known, rows("b", HARD))) == [PLAIN, HARD]
    assert list(loop_ablation.merged({}, rows("b", HARD))) == [PLAIN, HARD]
