"""Changed targets: they have learnt what they were taught, and their prompts are unseen."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from inference.target.loading import TargetConfig
from inference.target.model import TargetModel
from scripts.assets.changed_targets import MADE_FILE, WINDOW, Recipe, deal_halves, finetune, unseen
from scripts.assets.conversations import Pair, read_rows
from scripts.assets.python_sources import from_stdlib, from_topics
from tests.inference.tokenizers import save_micro_target

PROMPTS = Path(__file__).resolve().parents[3] / "assets" / "prompts"


def test_unseen_prompts_share_nothing_with_what_drafters_learn() -> None:
    documents = [
        document for document in from_stdlib() if not document.path.startswith(("test", "idlelib"))
    ]
    found = unseen(PROMPTS, [*documents, *from_topics()])
    asked = [row["messages"][0]["content"] for row in found]
    assert (
        len(found) > 550
        and len(set(asked)) == len(asked)
        and len({row["id"] for row in found}) == len(found)
    )
    learnt = {
        row["messages"][0]["content"] for row in read_rows(PROMPTS / "training" / "train.jsonl")
    }
    assert not learnt & set(asked)
    one, other = deal_halves(found)
    assert abs(len(one) - len(other)) <= 3 and not {row["id"] for row in one} & {
        row["id"] for row in other
    }
    assert (
        {row["domain"] for row in one}
        == {row["domain"] for row in other}
        == {"code", "explain", "json", "reference", "rewrite", "summarise"}
    )


@pytest.mark.parametrize("rank", [0, 2])
def test_a_finetuned_target_has_learnt_its_rows(tmp_path: Path, rank: int) -> None:
    base = save_micro_target(tmp_path / "base")
    pairs = [
        Pair("native", "m", "", "", f"two numbers {n % 3}", "a list of items") for n in range(60)
    ]
    recipe = Recipe(steps=12, tokens_per_step=WINDOW, lr=2e-2, lora_rank=rank)
    finetune(base, tmp_path / "made", pairs, recipe)
    facts = json.loads((tmp_path / "made" / MADE_FILE).read_text())
    assert facts["last_loss"] < 0.8 * facts["first_loss"] and facts["lora_rank"] == rank
    paths = [str(tmp_path / name) for name in ("base", "made")]
    old, new = (
        TargetModel.load(TargetConfig(path=path, dtype="float32", device="cpu")) for path in paths
    )
    old.info.require_same_sizes(new.info)
    assert old.info.revision != new.info.revision
    assert not torch.equal(old.weights.lm_head, new.weights.lm_head) or rank
    before = (tmp_path / "made" / "config.json").stat().st_mtime_ns
    finetune(base, tmp_path / "made", pairs, recipe)  # done already
    assert (tmp_path / "made" / "config.json").stat().st_mtime_ns == before
