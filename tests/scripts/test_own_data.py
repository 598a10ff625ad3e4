"""A run on somebody's own data: prompts for validation and measuring come from it, and what was
trained on is not measured."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from heads.api.errors import UserError
from inference.manifest import read_manifest
from inference.measure.config import BenchConfig
from inference.measure.prompts import load_prompts
from inference.report.model import read_report
from scripts.cli import main
from scripts.config.schema import load_settings
from scripts.config.stages import STAGES
from scripts.run.prompts import bench_of
from scripts.stages.loop.plan import RoundPlan
from tests.scripts.loops import micro_loop

GIVEN = ("train.prompts", "bench=jsonl", "bench.prompts", "loop.", "feedback.", "data.id_column")
"""What of a micro loop's overrides chooses prompts, or belongs to its rounds."""


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """The folder of a loop on own data that has run, and its overrides."""
    folder = tmp_path_factory.mktemp("own")
    own = [item for item in micro_loop(folder) if not item.startswith(GIVEN)]
    own += ["run.name=own", f"run.root={folder / 'outputs'}", "data.reserve.share=0.2"]
    assert main(["loop", *own]) == 0
    return folder / "outputs" / "own", own


def measured(given: list[str]) -> list[str]:
    """The overrides that `measure` reads."""
    groups = ("data", "head", "engine", "optim", "train", "sampling", "generate")
    return [item for item in given if item.partition("=")[0].split(".")[0] not in groups]


def said(row: Any) -> str:
    return str(row.messages[0]["content"])


def test_prompts_are_held_out_of_the_runs_data(ran: tuple[Path, list[str]]) -> None:
    run, _ = ran
    manifest = read_manifest(run / "generate", "generate")
    assert {use: entry["rows"] for use, entry in manifest["held_out"].items()} == {
        "bench": 4,
        "validation": 4,
    }
    left_out = manifest["input"]["left_out"]
    assert sum(left_out.values()) == 24 - manifest["counts"]["done"] >= 8
    (source,) = manifest["input"]["sources"]
    assert (
        source["read_as"]
        == "prompts (column 'prompt'), domains from 'domain'; not read: column 'id'"
    )
    trained = read_manifest(run / "train" / "medusa", "train")["data"]["validation"]
    assert [Path(path).name for path in trained] == ["validation.jsonl"]
    report = read_report(run / "measure")
    assert Path(report.run.bench["prompts"]).name == "bench.jsonl"
    held = {one.id for one in load_prompts(run / "generate" / "input" / "bench.jsonl")}
    assert set(report.run.prompts["hashes"]) < held  # one of them warms up
    assert report.run.leaks is not None
    assert report.run.leaks["left_out"] == [] and report.run.leaks["unknown"] == []
    assert report.run.leaks["rows"] == manifest["counts"]["done"]


def test_prompts_that_were_trained_on_are_not_measured(
    ran: tuple[Path, list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, given = ran
    training = (run.parents[1] / "train.jsonl").read_text()
    (tmp_path / "all.jsonl").write_text(training)
    bench = [*measured(given), "bench=jsonl", f"bench.prompts={tmp_path / 'all.jsonl'}"]
    assert main(["measure", *bench, "measure.name=all"]) == 2
    error = capsys.readouterr().err
    assert "of the 24 prompts" in error and "were trained on" in error and "medusa" in error
    assert not (run / "all" / "report.json").exists()

    held = {said(one) for one in load_prompts(run / "generate" / "input" / "bench.jsonl")}
    held |= {said(one) for one in load_prompts(run / "generate" / "input" / "validation.jsonl")}
    rows = [json.loads(line) for line in training.splitlines()]
    leak = next(row for row in rows if row["prompt"] not in held)
    fresh = [{"id": f"n{n}", "prompt": f"Something else, number {n}."} for n in range(4)]
    (tmp_path / "some.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [leak, *fresh]))
    bench[-1] = f"bench.prompts={tmp_path / 'some.jsonl'}"
    assert main(["measure", *bench, "measure.name=some"]) == 0
    assert "left out: 1 of 5 prompts" in capsys.readouterr().out
    report = read_report(run / "some")
    assert report.run.leaks is not None
    assert (report.run.leaks["exact"], report.run.leaks["left_out"]) == (1, [leak["id"]])
    assert leak["id"] not in report.run.prompts["hashes"]
    assert main(["report", f"report.reports=[{run / 'some'}]", f"report.out={tmp_path}"]) == 0
    assert "1 of 5 prompts were left out" in (tmp_path / "report.md").read_text()


def test_a_loop_that_measures_on_its_own_training_data_is_refused(
    ran: tuple[Path, list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, given = ran
    file = run.parents[1] / "train.jsonl"
    leak = [*given, "bench=jsonl", f"bench.prompts={file}", "run.name=leak"]
    assert main(["loop", *leak]) == 2
    assert "all 24 rows of the data repeat prompts that are held out" in capsys.readouterr().err


def test_without_any_prompts_a_measurement_says_what_to_do(
    in_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["target=local", "target.path=some/model", "run.name=none", "measure.kinds=[ngram]"]
    assert main(["measure", *given]) == 2
    error = capsys.readouterr().err
    assert "there are no prompts to measure on" in error
    assert "bench=jsonl bench.prompts=" in error and "bench=mtbench" in error


def test_a_folder_of_prompts_replaces_the_embedded_ones(in_folder: Path) -> None:
    """The domains of the embedded prompts say nothing about others."""
    from scripts.run.prompts import load

    (in_folder / "mine").mkdir()
    (in_folder / "mine" / "support.jsonl").write_text('{"prompt": "Why?"}\n')
    settings = load_settings(STAGES["measure"], ["bench.prompts=mine"])
    assert [one.domain for one in load(settings).prompts] == ["support"]


def test_benches_are_read_in_every_form_of_data(in_folder: Path) -> None:
    from scripts.run.prompts import load

    rows = [
        {"conversations": [{"from": "human", "value": "Hello!"}, {"from": "gpt", "value": "Hi."}]},
        {"conversations": [{"from": "gpt", "value": "Hi."}]},
    ]
    (in_folder / "talks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (in_folder / "talks.json").write_text(json.dumps(rows[:1]))
    (in_folder / "lines.txt").write_text("Hello!\n")
    for name in ("talks.jsonl", "talks.json", "lines.txt"):
        settings = load_settings(STAGES["measure"], ["bench=jsonl", f"bench.prompts={name}"])
        assert [said(one) for one in load(settings).prompts] == ["Hello!"]


@pytest.mark.parametrize(
    ("given", "data", "bench", "prompts"),
    [
        ([], "embedded", "embedded", 1),
        (["data=jsonl", "data.path=x"], "jsonl", "own", 0),
        (["target=local", "target.path=x", "data=jsonl", "data.path=x"], "jsonl", "own", 0),
        (["experiment=qwen3_8b_eagle3"], "perfectblend", "own", 0),
        (["experiment=llama31_8b_medusa", "bench=mtbench"], "ultrachat", "mtbench", 0),
        (["experiment=demo", "bench=thorough"], "embedded", "thorough", 1),
    ],
)
def test_the_embedded_prompts_are_for_the_embedded_data(
    given: list[str], data: str, bench: str, prompts: int
) -> None:
    settings = load_settings(STAGES["loop"], given)
    assert (settings.choices["data"], settings.choices["bench"]) == (data, bench)
    assert len(settings.train.prompts) == prompts
    assert bool(settings.data.reserve.bench) == (data != "embedded")


@pytest.mark.parametrize("bench", ["profile", "thorough", "baselines"])
def test_benches_that_build_on_the_embedded_one_take_its_prompts_for_its_data_alone(
    bench: str, in_folder: Path
) -> None:
    def found(*given: str) -> BenchConfig:
        return bench_of(load_settings(STAGES["measure"], [f"bench={bench}", *given]))

    assert Path(found().prompts).name == "prompts" and found().domains
    own = found("bench.prompts=mine.jsonl")
    assert (own.prompts, own.domains) == ("mine.jsonl", ())
    with pytest.raises(UserError, match="there are no prompts to measure on"):
        found("experiment=qwen3_8b_eagle3")


@pytest.mark.slow
def test_all_rounds_share_the_prompts_that_the_first_one_held_out(tmp_path: Path) -> None:
    rounds: Callable[[str], bool] = lambda item: item.startswith(("loop.", "feedback."))  # noqa: E731
    given = [item for item in micro_loop(tmp_path) if rounds(item) or not item.startswith(GIVEN)]
    given += ["run.name=own", f"run.root={tmp_path / 'outputs'}", "loop.rounds=2"]
    assert main(["loop", *given]) == 0
    run = tmp_path / "outputs" / "own"
    held = [
        run / "round-0" / "generate" / "input" / f"{use}.jsonl" for use in ("bench", "validation")
    ]
    prompts = {said(one) for path in held for one in load_prompts(path)}
    assert prompts
    plan = RoundPlan(load_settings(STAGES["loop"], given))
    assert [Path(path).name for path in plan.validation()] == ["validation.jsonl"]
    for number in range(2):
        report = read_report(run / f"round-{number}" / "measure")
        assert Path(report.run.bench["prompts"]).name == "validation.jsonl"
    final = read_report(run / "measure")
    assert Path(final.run.bench["prompts"]).parts[-4:] == (
        "round-0",
        "generate",
        "input",
        "bench.jsonl",
    )
    assert final.run.leaks is not None and final.run.leaks["left_out"] == []
