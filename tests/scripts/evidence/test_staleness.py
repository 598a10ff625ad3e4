"""The report on staleness: the watch alarms on resampled streams of a worse drafter alone, and
every version of the target can be made."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from inference.staleness.evidence import Grid
from scripts.assets import changed_targets
from scripts.evidence.staleness import CHANGES, LENGTH, Evidence, alarm
from scripts.tools.common import TARGET
from tests.inference.staleness.answers import DEPTH, MOST, draw


@pytest.mark.parametrize(("chance", "raised"), [(0.55, False), (0.2, True)])
def test_streams_alarm_where_the_drafter_is_worse(chance: float, raised: bool) -> None:
    rng, sizes = np.random.default_rng(0), {"code": 30, "prose": 40}
    known = {name: draw(rng, 0.55, 90) for name in sizes}
    fresh = {name: draw(rng, chance, 60) for name in sizes}
    for _ in range(2):
        after = alarm(Grid(DEPTH), MOST, known, sizes, fresh, rng)
        assert (after is not None and 1 < after < LENGTH) == raised


def test_every_change_names_a_target_that_is_made_or_a_setting() -> None:
    assert TARGET.is_dir()
    for folder, _ in CHANGES.values():
        assert folder in ("", *changed_targets.RECIPES)
    row = Evidence(Path("w"), Path("d"), "distilled")
    assert row.old == Path("d/train/distilled/best")
    assert row.full == Path("w/full/train/distilled")
