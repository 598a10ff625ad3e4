"""The report on staleness: its fast streams are the watch's own test, its prompts are unseen, its targets have changed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from inference.staleness.evidence import Bets, Grid, RatioEvidence
from inference.staleness.sequential_test import DriftTest
from inference.target.loading import TargetConfig
from inference.target.model import TargetModel
from scripts.held_out_target.making import read_json
from scripts.tiny_target import corpus
from scripts.watch_report import CHANGES, ROOT, TARGET, Place
from scripts.watch_targets import making, prompts
from scripts.watch_targets.streams import Plan, Streams
from tests.inference.staleness.answers import DEPTH, MOST, draw
from tests.inference.tokenizers import save_micro_target

GRID = Grid(DEPTH)
PLAN = Plan({"code": 30, "prose": 40}, 80, 0.05, 0.01)


class Recorded(Streams):
    """Streams that keep what they drew, so that the watch itself can be shown the same."""

    def evidence(self, name: str, known: np.ndarray, fresh: np.ndarray) -> np.ndarray:
        self.drawn[name] = (known, fresh)
        return super().evidence(name, known, fresh)

    def one(self, rng: np.random.Generator) -> int | None:
        self.drawn: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        kept = np.random.Generator(type(rng.bit_generator)())
        kept.bit_generator.state = rng.bit_generator.state
        self.order = kept.choice(len(self.domains), self.plan.length, p=self.mix)
        return super().one(rng)


@pytest.mark.parametrize("chance", [0.55, 0.45, 0.2])
def test_streams_alarm_where_the_watch_does(chance: float) -> None:
    rng = np.random.default_rng(0)
    known = {name: draw(rng, 0.55, 90) for name in PLAN.reference}
    fresh = {name: draw(rng, chance, 60) for name in PLAN.reference}
    streams = Recorded(GRID, MOST, known, fresh, PLAN)
    rng = np.random.default_rng(1)
    found = []
    for _ in range(4):
        after = streams.one(rng)
        evidence: dict[str, RatioEvidence] = {
            name: Bets(GRID, MOST, [known[name][i] for i in chosen]) for name, (chosen, _) in streams.drawn.items()
        }
        test = DriftTest(GRID, MOST, evidence, PLAN.tolerance, PLAN.alarm_rate)
        left = {name: list(places) for name, (_, places) in streams.drawn.items()}
        for number in streams.order:
            name = streams.domains[number]
            test.add(name, *fresh[name][left[name].pop(0)])
        assert after == test.alarm_after
        found.append(after)
    assert all(found) if chance == 0.2 else not any(found) if chance == 0.55 else True


def test_unseen_prompts_share_nothing_with_what_drafters_learn() -> None:
    documents = [document for document in corpus.from_stdlib() if not document.path.startswith(("test", "idlelib"))]
    found = prompts.unseen(ROOT / "assets" / "prompts", [*documents, *corpus.from_topics()])
    asked = [row["messages"][0]["content"] for row in found]
    assert len(found) > 550 and len(set(asked)) == len(asked) and len({row["id"] for row in found}) == len(found)
    learnt = {row["messages"][0]["content"] for row in prompts.read(ROOT / "assets" / "prompts" / "training" / "train.jsonl")}
    assert not learnt & set(asked)
    one, other = prompts.halves(found)
    assert abs(len(one) - len(other)) <= 3 and not {row["id"] for row in one} & {row["id"] for row in other}
    assert {row["domain"] for row in one} == {row["domain"] for row in other} == {"code", "explain", "reference"}


@pytest.mark.parametrize("rank", [0, 2])
def test_a_finetuned_target_has_learnt_its_rows(tmp_path: Path, rank: int) -> None:
    base = save_micro_target(tmp_path / "base")
    rows = [{"asked": f"two numbers {n % 3}", "answer": "a list of items", "source": "s", "domain": "d"} for n in range(60)]
    recipe = making.Recipe(steps=12, tokens_per_step=making.WINDOW, lr=2e-2, lora_rank=rank)
    making.finetune(base, tmp_path / "made", rows, recipe)
    facts = read_json(tmp_path / "made" / making.MADE_FILE)
    assert facts["last_loss"] < 0.8 * facts["first_loss"] and facts["lora_rank"] == rank
    paths = [str(tmp_path / name) for name in ("base", "made")]
    old, new = (TargetModel.load(TargetConfig(path=path, dtype="float32", device="cpu")) for path in paths)
    old.info.require_same_sizes(new.info)
    assert old.info.revision != new.info.revision
    assert not torch.equal(old.weights.lm_head, new.weights.lm_head) or rank
    before = (tmp_path / "made" / "config.json").stat().st_mtime_ns
    making.finetune(base, tmp_path / "made", rows, recipe)  # done already
    assert (tmp_path / "made" / "config.json").stat().st_mtime_ns == before


def test_every_change_names_a_target_that_is_made_or_a_setting() -> None:
    assert TARGET.is_dir()
    for change in CHANGES.values():
        assert change.folder in ("", *making.RECIPES)
    place = Place(Path("w"), Path("d"), "distilled")
    assert place.old == Path("d/train/distilled@0.0015/best") and place.full == Path("w/full/train/distilled")
