"""The loop's plan: which stages, in which order, with which part of the command line; and how a
launcher is put before them."""

from __future__ import annotations

import io
import stat
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from heads.api.checkpoint import WEIGHTS_FILE
from heads.api.errors import UserError
from inference.manifest import file_sha256, write_json
from scripts.config.schema import Settings, load_settings, read_settings
from scripts.config.stage_configs import SweepRow
from scripts.config.stages import STAGES
from scripts.run.folder import RunRecord
from scripts.run.runner import StoppedError
from scripts.stages.generate import data_of
from scripts.stages.loop import steps
from scripts.stages.loop.plan import RoundPlan
from scripts.stages.loop.progress import Forecast, about
from scripts.stages.loop.stage import plan, run
from scripts.stages.loop.steps import Step, launch_step, perform
from train.stopping import Stopped

A, B = "embedded_medusa", "embedded_eagle3"


def settings(overrides: list[str], **loop: object) -> Settings:
    found = load_settings(STAGES["loop"], overrides)
    return found.put(loop=replace(found.loop, **loop))


def shown(steps: list[Step]) -> list[str]:
    return [" ".join(step.settings.command[1:]) for step in steps]


def test_without_recipes_the_loop_trains_the_head_it_is_given() -> None:
    given = ["head=eagle3", "optim.lr=0.1", "bench.repeats=2", "run.name=x", "data.limit=5"]
    assert shown(plan(settings(given))) == [
        "generate run.name=x data.limit=5",
        "train head=eagle3 optim.lr=0.1 run.name=x",
        "measure bench.repeats=2 run.name=x",
        "report run.name=x",
    ]


def test_a_loop_on_given_answers_generates_none(tmp_path: Path) -> None:
    given = ["head=medusa", f"run.root={tmp_path}", "run.answers=elsewhere", "train.max_steps=0"]
    with pytest.raises(UserError, match=r"every round of loop\.rounds has answers"):
        plan(settings(given, rounds=2))
    found = plan(settings(given))
    assert [step.title for step in found] == ["train", "measure", "report"]
    assert found[0].settings.run.answers == "elsewhere"
    forecast = Forecast.of(found)
    for _ in found:
        forecast.finish(1.0)


def test_each_recipe_is_put_before_the_loops_own_experiment() -> None:
    given = ["experiment=demo", "train.max_steps=3", "loop.launch=", "debug=fast", "decode.depth=2"]
    measures = {"sampled": ("decode.temperature=1",)}
    own = {"recipes": (A, B), "measures": measures, "store_features": False}
    assert shown(plan(settings(given, **own))) == [
        "generate experiment=[embedded_medusa,demo] debug=fast",
        "train experiment=[embedded_medusa,demo] train.max_steps=3 debug=fast decode.depth=2",
        "train experiment=[embedded_eagle3,demo] train.max_steps=3 debug=fast decode.depth=2",
        "measure experiment=[embedded_medusa,demo] debug=fast decode.depth=2",
        "measure experiment=[embedded_medusa,demo] debug=fast decode.depth=2 "
        "measure.name=sampled decode.temperature=1",
        "report experiment=[embedded_medusa,demo] debug=fast",
    ]


def test_experiments_that_are_given_as_a_list_reach_every_stage() -> None:
    """Hydra names no choice for a list, and its stages had the defaults once."""
    given = ["experiment=[embedded_eagle3,embedded_loop]", "run.name=x"]
    found = load_settings(STAGES["loop"], given)
    assert found.choices["experiment"] == ["embedded_eagle3", "embedded_loop"]
    own = {"recipes": (), "store_features": False}
    assert shown(plan(settings(given, **own, rounds=0))) == [
        f"{stage} experiment=[embedded_eagle3,embedded_loop] run.name=x"
        for stage in ("generate", "train", "measure", "report")
    ]
    train = RoundPlan(found).train
    assert (train.optim.kind, train.train.global_batch) == ("muon", 2)
    assert train.choices["experiment"] == found.choices["experiment"]
    # the later choice of a key wins, as it does for every other setting
    assert (
        load_settings(STAGES["train"], [*given[:1], "experiment=demo"]).choices["experiment"]
        == "demo"
    )


def test_one_store_of_features_serves_all_recipes() -> None:
    given = ["run.name=x", "train.max_steps=3", "optim.lr=0.1"]
    steps = plan(settings(given, recipes=(A, B), store_features=True))
    assert shown(steps[:4]) == [
        "generate experiment=[embedded_medusa] run.name=x",
        'features experiment=[embedded_medusa] run.name=x train.max_steps=3 features.mode="store"',
        "train features=store experiment=[embedded_medusa] run.name=x train.max_steps=3 optim.lr=0.1",
        "train features=store experiment=[embedded_eagle3] run.name=x train.max_steps=3 optim.lr=0.1",
    ]
    assert [(title, kind) for title, kind, _ in steps[1].heads] == [
        (f"train {A}", "medusa"),
        (f"train {B}", "eagle3"),
    ]
    assert steps[1].heads[1][2] == steps[3].settings.head.config


@pytest.mark.parametrize(
    "row",
    [
        SweepRow((1e-3,), "distilled", ("train.on_policy.share=0.5",)),
        SweepRow((1e-3,), "eagle3", ("train.domains=[code]", "features=online")),
    ],
    ids=["rewrites its rows", "chose so"],
)
def test_a_training_with_rows_of_its_own_computes_its_features_itself(row: SweepRow) -> None:
    sweep = {"plain": SweepRow((1e-3,), "eagle3"), "own": row}
    own = {"recipes": (), "measures": {}, "sweep": sweep, "store_features": True}
    _, store, plain, other, *_ = plan(settings(["run.name=x"], **own))
    assert [title for title, _, _ in store.heads] == ["train plain@0.001"]
    modes = [step.settings.features.mode for step in (store, plain, other)]
    assert modes == ["store", "store", "online"]


def test_features_that_trainings_read_differently_are_not_stored() -> None:
    given = ["features=online"]
    with pytest.raises(UserError, match="one store for all trainings"):
        plan(settings(given, recipes=(A, B), store_features=True))
    with pytest.raises(UserError, match=r"Leave out loop.store_features or loop.rounds"):
        settings([], recipes=(A,), rounds=2, store_features=True)


@pytest.mark.slow
def test_a_loop_with_stored_features_trains_the_same_drafter(in_folder: Path) -> None:
    weights = {}
    for name, stored in (("online", False), ("stored", True)):
        given = ["debug=fast", f"run.name={name}", "head=eagle3", "measure.kinds=[]"]
        run(settings([*given, "engine.precision=bfloat16"], store_features=stored))
        folder = in_folder / "outputs" / name
        assert (folder / "features").is_dir() == stored
        weights[name] = file_sha256(folder / "train" / "eagle3" / "best" / WEIGHTS_FILE)
    assert weights["online"] == weights["stored"]


def test_a_draft_of_a_drafter_that_is_not_measured_is_refused_before_the_training() -> None:
    drafts = "measure.drafts={ngram: {depth: 2}, eagle3: {depth: 3}}"
    plan(settings([drafts, "measure.kinds=[ngram]"], recipes=(A, B)))
    with pytest.raises(UserError, match="'ngram', which is not measured"):
        plan(settings([drafts, "measure.kinds=[]"], recipes=(A, B)))


def test_a_checkpoint_has_the_draft_of_the_name_with_which_it_is_measured(tmp_path: Path) -> None:
    best = tmp_path / "train" / "shipped" / "best"
    best.mkdir(parents=True)
    write_json(
        best / "config.json",
        {"kind": "medusa", "config": {}, "target": {}, "needs": {}, "format": 1},
    )
    plan(settings([f"measure.drafters=[{best}]", "measure.drafts.shipped.depth=2"]))


def test_experiments_in_the_overrides_of_a_row_or_a_measurement_are_added() -> None:
    """Beside the loop's own ones, whose folder stays; embedded_loop names a run."""
    more = "experiment=embedded_loop"
    measured = plan(settings([f"experiment={A}"], measures={"x": (more,)}))[-2].settings
    assert measured.choices["experiment"] == [A, "embedded_loop"]
    assert (measured.run.name, measured.measure.name) == ("default", "x")
    row = SweepRow((1e-3,), "medusa", (more,))
    own = {"recipes": (), "measures": {}, "sweep": {"row": row}, "store_features": False}
    trained = plan(settings(["experiment=demo", "measure.drafts={}"], **own))[1].settings
    assert trained.choices["experiment"] == ["embedded_loop", "demo"]
    assert trained.run.name == "demo"


def test_a_measurement_may_delete_what_the_command_line_deletes() -> None:
    given = ["experiment=demo", "measure.kinds=[]"]
    with pytest.raises(UserError, match=r"'~measure\.drafts\.ngram'"):
        plan(settings(given))
    found = plan(settings([*given, "~measure.drafts.ngram"]))
    assert [step.settings.measure.drafts for step in found if step.stage.name == "measure"] == [
        {},
        {},
    ]


@pytest.mark.parametrize("override", ["head=medusa", "run.drafter=x"])
def test_what_cannot_apply_to_several_recipes_is_refused(override: str) -> None:
    key = override.split("=")[0]
    with pytest.raises(
        UserError, match=rf"{key} is given, but this loop trains the recipes {A}, {B}"
    ):
        plan(settings([override], recipes=(A, B)))


def three_steps(root: Path) -> list[Step]:
    given = ["data.limit=100", "sampling.max_new_tokens=10", f"run.root={root}", "run.name=x"]
    return [
        Step(
            name,
            load_settings(
                STAGES[name], [item for item in given if item.split(".")[0] in STAGES[name].groups]
            ),
        )
        for name in ("generate", "train", "measure")
    ]


def test_a_loop_names_a_time_once_it_knows_one(tmp_path: Path) -> None:
    forecast = Forecast.of(three_steps(tmp_path))
    assert (forecast.left, forecast.share) == (None, 0.0)
    assert forecast.words() == "0:00, time left: not known yet"
    forecast.finish(2 * forecast.expected[0])  # twice as long as expected: so will the others
    assert forecast.left == pytest.approx(2 * sum(forecast.expected[1:]))
    assert forecast.share == pytest.approx(forecast.expected[0] / sum(forecast.expected))
    forecast.finish(2 * forecast.expected[1])
    forecast.finish(2 * forecast.expected[2])
    assert (forecast.left, forecast.share) == (0.0, 1.0)


def test_the_next_loop_expects_what_the_last_one_took(tmp_path: Path) -> None:
    first = Forecast.of(three_steps(tmp_path))
    for seconds in (40.0, 200.0, 60.0):
        first.finish(seconds)
    again = Forecast.of(three_steps(tmp_path))
    assert again.expected == pytest.approx([40.0, 200.0, 60.0])
    assert again.words() == "0:00, about 5 min left"
    again.finish(20.0)  # half of it: so will the others
    assert again.words() == "0:20, about 2 min left"
    (tmp_path / "loop_times.json").write_text("{")  # damaged: as if no loop had run
    assert Forecast.of(three_steps(tmp_path)).left is None


def test_complete_steps_take_no_time(in_folder: Path) -> None:
    steps = three_steps(in_folder)
    RunRecord(stage="generate", state="complete").write(made(in_folder / "x" / "generate"))
    forecast = Forecast.of(steps)
    assert forecast.expected[0] == 0.0 and min(forecast.expected[1:]) > 0
    forecast.finish(3.0)  # skipping says nothing of the others
    assert forecast.left is None
    assert not (in_folder / "loop_times.json").exists()


def made(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder


def test_a_step_is_announced_in_one_line(tmp_path: Path) -> None:
    forecast = Forecast.of(three_steps(tmp_path))
    log = Console(file=io.StringIO(), record=True, width=60)
    forecast.show("train embedded_medusa", log)
    assert log.export_text() == (
        "\n[1/3] train embedded_medusa  (0:00, time left: not known yet)\n"
    )
    forecast.finish(1e5)
    terminal = Console(
        file=io.StringIO(), record=True, width=100, force_terminal=True, color_system=None
    )
    forecast.show("measure", terminal)
    (line,) = terminal.export_text().split("\n")[1:-1]
    assert line.startswith("[2/3] measure ") and "1666:40, about" in line


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (5, "some seconds left"),
        (33, "about 30 s left"),
        (130, "about 2 min left"),
        (3700, "about 62 min left"),
        (9000, "about 2.5 h left"),
    ],
)
def test_a_forecast_is_no_more_exact_than_it_is(seconds: float, words: str) -> None:
    assert about(seconds) == words


def step(name: str = "generate") -> Step:
    found = load_settings(STAGES[name], ["run.name=x"])
    if name != "generate":
        return Step(name, found)
    return Step(name, found.put(sampling=replace(found.sampling, temperature=0.25)))


def test_a_launcher_is_put_before_the_command(in_folder: Path) -> None:
    launcher = in_folder / "launcher"
    launcher.write_text('#!/bin/sh\necho "$@" > called\n')
    launcher.chmod(launcher.stat().st_mode | stat.S_IXUSR)
    launch_step(f"{launcher} --processes 2", step())
    words = Path("called").read_text().split()
    assert words[:2] == ["--processes", "2"]
    assert words[2].endswith("headstart")
    assert words[3:5] == ["generate", "--config"]
    read = read_settings(STAGES["generate"], Path(words[5]))
    assert read.resolved == step().settings.resolved
    assert (read.sampling.temperature, read.run.name, read.given("run.name")) == (0.25, "x", True)
    with pytest.raises(UserError, match="does not hold the settings of stage 'train'"):
        read_settings(STAGES["train"], Path(words[5]))


def test_a_launcher_that_fails_or_is_missing_is_one_clear_error() -> None:
    with pytest.raises(UserError, match="'generate' ended with status 1"):
        launch_step("false", step())
    with pytest.raises(UserError, match="'no-such-launcher' is not a command here"):
        launch_step("no-such-launcher", step())
    with pytest.raises(UserError, match=r"loop\.launch cannot be split into words .*: 'torchrun"):
        launch_step("'torchrun", step())


def test_a_signal_in_this_process_is_no_success(monkeypatch: pytest.MonkeyPatch) -> None:
    """As behind a launcher: a stage ends with status 0 after a scheduler's signal."""

    def stop(settings: Settings) -> int:
        raise leaving

    monkeypatch.setattr(steps, "run_one", stop)
    leaving = Stopped("SIGTERM", 1)
    with pytest.raises(StoppedError, match="'train' was stopped before it was complete"):
        perform("", step("train"))
    leaving = Stopped("SIGINT", 1)
    with pytest.raises(Stopped):
        perform("", step("train"))


def test_a_sweep_trains_every_row_at_every_rate() -> None:
    sweep = {
        "medusa": SweepRow((1e-3, 0.01)),
        "long": SweepRow((3e-3,), "eagle3", ("train.epochs=6",)),
    }
    own = {"recipes": (), "measures": {}, "sweep": sweep, "store_features": False}
    steps = plan(settings(["experiment=demo", "run.name=x"], **own))
    assert [step.settings.optim.lr for step in steps[1:4]] == [0.001, 0.01, 0.003]
    assert [step.settings.head.kind for step in steps[1:4]] == ["medusa", "medusa", "eagle3"]
    assert shown(steps) == [
        "generate experiment=[demo] run.name=x",
        "train head=medusa optim.lr=0.001 experiment=[demo] run.name=x run.drafter='medusa@0.001'",
        "train head=medusa optim.lr=0.01 experiment=[demo] run.name=x run.drafter='medusa@0.01'",
        "train head=eagle3 train.epochs=6 optim.lr=0.003 experiment=[demo] run.name=x "
        "run.drafter='long@0.003'",
        "measure experiment=[demo] run.name=x",
        "report experiment=[demo] run.name=x",
    ]
    some = plan(settings(["experiment=demo", "run.name=x"], **own, only=("long",)))
    assert [step.title for step in some] == ["generate", "train long@0.003", "measure", "report"]
    # the run may have trained others before
    assert shown(some)[2] == "measure measure.drafters=[long] experiment=[demo] run.name=x"
    with pytest.raises(UserError, match=r"loop\.only: 'lnog' is no row .* Did you mean 'long'"):
        settings(["experiment=demo"], **own, only=("lnog",))
    with pytest.raises(
        UserError, match="head is given, but this loop trains the recipes medusa, long"
    ):
        plan(settings(["head=medusa"], sweep=sweep))
    with pytest.raises(UserError, match=r"loop\.sweep\.<row>\.rates is empty"):
        SweepRow(())
    with pytest.raises(
        UserError, match=r"loop\.sweep\.a\.rates\[0\] must be above 0 and at most 100; given: -1"
    ):
        settings(["loop.sweep={a: {rates: [-1]}}"])


def test_what_the_loop_measures_and_watches_tau_on_is_held_out_of_its_data() -> None:
    given = ["data=jsonl", "data.path=p.jsonl", "train.prompts=[v.jsonl]"]
    more = "loop.measures={gsm: ['bench=gsm8k','bench.prompts=openai/gsm8k']}"
    bench = ["bench=jsonl", "bench.prompts=m.jsonl", more]
    settings = load_settings(STAGES["loop"], [*given, *bench])
    data = plan(settings)[0].settings.data
    assert data.held_out == ("v.jsonl",)
    assert [one.path for one in data.held_out_prompts] == ["m.jsonl", "openai/gsm8k"]
    reserve = data_of(plan(settings)[0].settings).reserve
    assert (reserve.validation, reserve.bench) == (0, 0)
    # without any of it, the data's own prompts are held out
    own = plan(load_settings(STAGES["loop"], given[:2]))[0].settings
    assert own.data.held_out_prompts == () and own.changed == {}
    assert (data_of(own).reserve.validation, data_of(own).reserve.bench) == (64, 128)
    # the embedded prompts are held out by their own data, once
    demo = plan(load_settings(STAGES["loop"], ["experiment=demo"]))[0].settings
    assert demo.changed == {}
    assert [one.path for one in data_of(demo).held_out_prompts] == ["assets/prompts"]
