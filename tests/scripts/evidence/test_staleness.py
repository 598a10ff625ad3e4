"""The report on staleness: its fast streams are the watch's own test."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from inference.staleness.evidence import Bets, Grid, RatioEvidence
from inference.staleness.sequential_test import DriftTest
from scripts.assets import changed_targets
from scripts.evidence.staleness import CHANGES, Folders
from scripts.evidence.streams import Plan, Streams
from scripts.tools.common import TARGET
from tests.inference.staleness.answers import DEPTH, MOST, draw

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
            name: Bets(GRID, MOST, [known[name][i] for i in chosen])
            for name, (chosen, _) in streams.drawn.items()
        }
        test = DriftTest(GRID, MOST, evidence, PLAN.tolerance, PLAN.alarm_rate)
        left = {name: list(places) for name, (_, places) in streams.drawn.items()}
        for number in streams.order:
            name = streams.domains[number]
            test.add(name, *fresh[name][left[name].pop(0)])
        assert after == test.alarm_after
        found.append(after)
    assert all(found) if chance == 0.2 else not any(found) if chance == 0.55 else True


def test_every_change_names_a_target_that_is_made_or_a_setting() -> None:
    assert TARGET.is_dir()
    for change in CHANGES.values():
        assert change.folder in ("", *changed_targets.RECIPES)
    place = Folders(Path("w"), Path("d"), "distilled")
    assert place.old == Path("d/train/distilled@0.0015/best") and place.full == Path(
        "w/full/train/distilled"
    )
