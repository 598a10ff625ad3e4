"""The training that settings describe: how trackers tell it apart from others."""

from __future__ import annotations

from scripts.config.compose import parse
from scripts.config.schema import load_settings
from scripts.config.stages import STAGES
from scripts.run.sweep import expand
from scripts.stages.train import job_of
from train.tracking.tracker import TrackerConfig


def trackers(*overrides: str) -> list[TrackerConfig]:
    """Of every job of a command with `-m`."""
    jobs = expand(STAGES["train"], parse(["run.name=qwen", *overrides]))
    return [job_of(load_settings(STAGES["train"], job)).config.tracker for job in jobs]


def test_the_jobs_of_a_sweep_have_names_of_their_own_in_one_group() -> None:
    found = trackers("head=medusa,eagle3", "optim.lr=1e-3,1e-4", "train.seed=1,2")
    assert len({item.name for item in found}) == 8
    assert found[0].name == "qwen/medusa-lr=0.001-seed=1"
    assert {(item.group, item.job_type) for item in found} == {("qwen", "train")}


def test_names_that_are_given_stay() -> None:
    given = ["train.tracker.name=mine", "train.tracker.group=night"]
    for item in trackers("head=medusa,eagle3", *given):
        assert (item.name, item.group) == ("mine", "night")
