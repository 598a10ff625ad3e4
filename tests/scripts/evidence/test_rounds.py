"""The report of rounds: its page says what its JSON holds, and a row's gains are those of the
numbers beside them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from scripts.config.schema import load_settings
from scripts.config.stages import STAGES
from scripts.evidence.rounds import (
    FEW_PROMPTS,
    FEW_RECIPE,
    OPEN_STEPS,
    markdown,
    open_training,
    other_prompts,
    own_overrides,
)
from scripts.tools.common import REPORTS
from train.data.sources import Mixture


@pytest.fixture(scope="module")
def content() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((REPORTS / "loop.json").read_text(encoding="utf-8"))
    return found


def test_the_page_is_written_from_the_json(content: dict[str, Any]) -> None:
    assert (REPORTS / "loop.md").read_text(encoding="utf-8") == "\n".join(markdown(content))


def test_gains_follow_from_the_rows(content: dict[str, Any]) -> None:
    """In the committed report: accepted drafted tokens per pass are tau - 1, and a row's gain is
    over its own open loop."""
    few = list(content.get("few_prompts", {}).get("kinds", {}).values())
    kinds = [
        *content["kinds"].values(),
        *few,
        *(again for entry in few for again in entry.get("repeated", {}).values()),
    ]
    assert kinds
    for entry in kinds:
        opened = entry["rows"]["open"]["tau"] - 1
        for row in entry["rows"].values():
            assert row["over_open"]["accepted"] == pytest.approx(
                (row["tau"] - 1) / opened - 1, abs=1e-9
            )
            assert row["lossless"]["mismatches"] == 0
            # equal training in whole steps, or less
            assert row["tokens"] <= 1.01 * entry["rows"]["open"]["tokens"]


def test_a_repetition_stands_beside_the_kind_that_it_repeats(content: dict[str, Any]) -> None:
    kind, entry = next(iter(content["kinds"].items()))
    again = {
        "overrides": entry["overrides"],
        "rows": {name: entry["rows"][name] for name in ("open", "loop")},
    }
    few = {"prompts": 96, "kinds": {kind: {**entry, "repeated": {"7": again}}}}
    page = "\n".join(markdown({**content, "kinds": {}, "few_prompts": few}))
    assert "Repeated with other prompts, as many, and seed 7:" in page
    row = next(line for line in page.splitlines() if line.startswith("| **rounds"))
    assert page.count(row) == 2  # the kind's own, and the repetition's


@pytest.mark.parametrize("seed", [0, 1])
def test_the_open_loop_of_few_prompts_trains_like_the_rounds(tmp_path: Path, seed: int) -> None:
    own = own_overrides("distilled")
    rounds = load_settings(STAGES["loop"], [FEW_RECIPE, *own, *other_prompts(seed)])
    opened = load_settings(STAGES["train"], open_training(own, seed, tmp_path))
    assert (opened.head, opened.optim, opened.engine) == (rounds.head, rounds.optim, rounds.engine)
    assert opened.run.seed == rounds.run.seed == seed
    assert opened.run.answers == str(tmp_path / "loop" / "round-0" / "generate")
    assert opened.train.max_steps == OPEN_STEPS


def test_a_repetition_takes_other_prompts() -> None:
    """As many of the same dataset, in an order that the seed chooses."""
    ids = {}
    for seed in (0, 1):
        settings = load_settings(STAGES["generate"], [FEW_RECIPE, *other_prompts(seed)])
        ids[seed] = {row.id for _, row in Mixture(settings.data).read()}
        assert len(ids[seed]) == FEW_PROMPTS
        assert settings.run.seed == seed
    assert len(ids[0] & ids[1]) < 30
