"""The loop's plan: which stages, in which order, with which part of the command line; and how a launcher is put before them."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from heads.api.errors import UserError
from scripts.config import Settings
from scripts.loop import LoopConfig, Step, SweepRow, launched, plan
from scripts.run import RunConfig
from scripts.stages import STAGES


def settings(loop: LoopConfig, overrides: list[str], experiment: str | list[str] | None = None) -> Settings:
    return Settings(
        STAGES["loop"], {"run": RunConfig(), "loop": loop}, {"experiment": experiment}, {}, overrides
    )


def shown(steps: list[Step]) -> list[str]:
    return [" ".join([step.stage.name, *step.overrides]) for step in steps]


def test_without_recipes_the_loop_trains_the_head_it_is_given() -> None:
    given = ["head=eagle3", "optim.lr=0.1", "bench.repeats=2", "run.name=x", "data.limit=5"]
    assert shown(plan(settings(LoopConfig(), given))) == [
        "generate run.name=x data.limit=5",
        "train head=eagle3 optim.lr=0.1 run.name=x",
        "measure bench.repeats=2 run.name=x",
        "report run.name=x",
    ]


def test_each_recipe_is_put_before_the_loops_own_experiment() -> None:
    loop = LoopConfig(recipes=("a", "b"), measures={"sampled": ("decode.temperature=1",)})
    given = ["experiment=demo", "train.max_steps=3", "loop.launch=", "debug=fast", "decode.depth=2"]
    assert shown(plan(settings(loop, given, "demo"))) == [
        "generate experiment=[a,demo] debug=fast",
        "train experiment=[a,demo] train.max_steps=3 debug=fast decode.depth=2",
        "train experiment=[b,demo] train.max_steps=3 debug=fast decode.depth=2",
        "measure experiment=[a,demo] debug=fast decode.depth=2",
        "measure experiment=[a,demo] debug=fast decode.depth=2 measure.name=sampled decode.temperature=1",
        "report experiment=[a,demo] debug=fast",
    ]


@pytest.mark.parametrize("override", ["head=medusa", "run.drafter=x"])
def test_what_cannot_apply_to_several_recipes_is_refused(override: str) -> None:
    key = override.split("=")[0]
    with pytest.raises(UserError, match=rf"{key} is given, but this loop trains the recipes a, b"):
        plan(settings(LoopConfig(recipes=("a", "b")), [override]))


def step(name: str = "generate") -> Step:
    return Step(STAGES[name], ["run.name=x"], name)


def test_a_launcher_is_put_before_the_command(in_folder: Path) -> None:
    launcher = in_folder / "launcher"
    launcher.write_text('#!/bin/sh\necho "$@" > called\n')
    launcher.chmod(launcher.stat().st_mode | stat.S_IXUSR)
    launched(f"{launcher} --processes 2", step())
    words = Path("called").read_text().split()
    assert words[:2] == ["--processes", "2"]
    assert words[2].endswith("headstart")
    assert words[3:] == ["generate", "run.name=x"]


def test_a_launcher_that_fails_or_is_missing_is_one_clear_error() -> None:
    with pytest.raises(UserError, match="'generate' ended with status 1"):
        launched("false", step())
    with pytest.raises(UserError, match="'no-such-launcher' is not a command here"):
        launched("no-such-launcher", step())


def test_a_sweep_trains_every_row_at_every_rate() -> None:
    loop = LoopConfig(sweep={"a": SweepRow((1e-3, 0.01)), "b_long": SweepRow((3e-3,), "b", ("train.epochs=6",))})
    assert shown(plan(settings(loop, ["experiment=demo", "run.name=x"], "demo"))) == [
        "generate experiment=[demo] run.name=x",
        "train head=a optim.lr=0.001 experiment=[demo] run.name=x run.drafter='a@0.001'",
        "train head=a optim.lr=0.01 experiment=[demo] run.name=x run.drafter='a@0.01'",
        "train head=b train.epochs=6 optim.lr=0.003 experiment=[demo] run.name=x run.drafter='b_long@0.003'",
        "measure experiment=[demo] run.name=x",
        "report experiment=[demo] run.name=x",
    ]
    with pytest.raises(UserError, match="head is given, but this loop trains the recipes a, b_long"):
        plan(settings(loop, ["head=medusa"]))
    with pytest.raises(UserError, match=r"loop\.sweep\.<row>\.rates needs one or more learning rates above 0"):
        SweepRow(())
