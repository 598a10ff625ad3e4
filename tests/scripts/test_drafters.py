"""Finding drafters: by name, by folder, by kind; and the draft that each is measured with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from heads.api.checkpoint import new_drafter, save_drafter
from heads.api.errors import UserError
from heads.api.registry import get_kind
from inference.decoding.config import DecodeConfig
from inference.manifest import write_json, write_manifest
from inference.report.model import REPORT_FILE
from inference.target.model import TargetModel
from scripts.config.schema import load_settings
from scripts.config.stage_configs import MeasureConfig, RunConfig
from scripts.config.stages import STAGES
from scripts.run import drafters
from scripts.run.drafters import Found, choose
from scripts.stages.measure import arm, chosen
from tests.inference.example_report import example_report
from tests.models import random_target

RUN = RunConfig(name="x")


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return random_target("llama")


def train_folder(target: TargetModel, name: str, decode: dict[str, object] | None = None) -> Path:
    """What a training leaves: a checkpoint, and the settings it was made with."""
    folder = RUN.directory / "train" / name
    medusa = new_drafter(
        "medusa", get_kind("medusa").config_class(), target.info, target.weights, seed=0
    )
    save_drafter(medusa, folder / "best", target.info)
    (folder / "config.yaml").write_text(yaml.safe_dump({"decode": decode or {}}))
    return folder


def test_a_drafter_is_found_by_name_folder_or_kind(target: TargetModel, in_folder: Path) -> None:
    folder = train_folder(target, "mine")
    by_name = drafters.find("mine", RUN)
    assert by_name == Found("mine", "medusa", folder / "best")
    assert drafters.find(str(folder), RUN) == drafters.find(str(folder / "best"), RUN) == by_name
    assert drafters.find("ngram", RUN) == Found("ngram", "ngram", None)
    loaded = drafters.load(by_name, target)
    assert torch.isfinite(loaded.residual_weight).all()
    assert drafters.load(drafters.find("ngram", RUN), target, {"max_n": 3}).config.max_n == 3


def test_untrained_drafters_are_described_by_values(target: TargetModel, in_folder: Path) -> None:
    heads = {"long": {"recipe": "ngram", "max_n": 7}, "short": {"kind": "ngram", "max_n": 2}}
    assert drafters.load(drafters.find("long", RUN, heads), target).config.max_n == 7
    assert drafters.load(drafters.find("short", RUN, heads), target).config.max_n == 2
    assert "ngram" in drafters.untrained_recipes() and "medusa" not in drafters.untrained_recipes()
    for values, message in (
        (
            {"recipe": "ngrm"},
            r"measure\.heads\.x: there is no head config 'ngrm'\. Did you mean 'ngram'",
        ),
        ({"recipe": "medusa"}, r"'x' \(kind 'medusa'\) has to be trained before it drafts"),
        ({"kind": "ngram", "max": 2}, r"measure\.heads\.x\.max: there is no such key"),
    ):
        with pytest.raises(UserError, match=message):
            drafters.find("x", RUN, {"x": values})


def test_one_draft_for_all_and_changes_on_top(target: TargetModel, in_folder: Path) -> None:
    given = ["measure.draft={shape: dynamic, nodes: 9}", "measure.drafts={ngram: {nodes: 5}}"]
    own = [
        arm(drafters.find("ngram", RUN), target, load_settings(STAGES["measure"], said)).decode
        for said in (given[:1], given)
    ]
    assert [(decode.shape, decode.nodes) for decode in own] == [("dynamic", 9), ("dynamic", 5)]


def test_a_kind_beside_the_trained_ones_takes_a_tree_where_they_take_a_dartree(
    target: TargetModel, in_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = ["decode=dartree"]
    settings = load_settings(STAGES["measure"], said)
    found = arm(drafters.find("ngram", RUN), target, settings).decode
    assert found.shape == "dynamic" and found.nodes == settings.decode.nodes
    assert "ngram drafts dynamic trees" in capsys.readouterr().out
    asked = load_settings(STAGES["measure"], [*said, "measure.drafts={ngram: {nodes: 5}}"])
    assert arm(drafters.find("ngram", RUN), target, asked).decode.shape == "dartree"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("mnie", r"there is no drafter 'mnie' in 'outputs/x'.* Did you mean 'mine'\?"),
        ("medusa", r"there is no drafter 'medusa'"),  # a kind with weights needs a checkpoint
        (".", r"'\.' is not a drafter checkpoint: it has no config\.json"),
    ],
)
def test_what_is_not_a_drafter_is_refused(
    target: TargetModel, in_folder: Path, given: str, message: str
) -> None:
    train_folder(target, "mine")
    with pytest.raises(UserError, match=message):
        drafters.find(given, RUN)


def test_a_drafter_brings_the_draft_it_was_trained_for(
    target: TargetModel, in_folder: Path
) -> None:
    tree = {
        "shape": "tree",
        "depth": 4,
        "choices": [[0], [1], [0, 0]],
        "temperature": 1.0,
        "batch_size": 7,
    }
    train_folder(target, "mine", tree)
    measured = DecodeConfig(temperature=0.5, batch_size=1, depth=6)
    own = drafters.draft_settings(drafters.find("mine", RUN), measured)
    assert (own.shape, own.choices) == ("tree", ((0,), (1,), (0, 0)))
    assert (own.temperature, own.batch_size) == (0.5, 1)  # the task is the measurement's
    changed = drafters.draft_settings(
        drafters.find("mine", RUN), measured, {"shape": "chain", "depth": 2}
    )
    assert (changed.shape, changed.depth) == ("chain", 2)
    assert drafters.draft_settings(drafters.find("ngram", RUN), measured) == measured
    with pytest.raises(
        UserError,
        match=r"measure\.drafts\.mine\.dept: a draft has no such key\. Did you mean 'depth'",
    ):
        drafters.draft_settings(drafters.find("mine", RUN), measured, {"dept": 2})


@pytest.mark.parametrize(
    ("given", "draft"),
    [
        (["decode=adaptive_goodput"], ("chain", 8)),
        (["decode=adaptive"], ("chain", 8)),
        (["decode=chain"], ("chain", 4)),
        (["decode=chain", "decode.depth=3"], ("chain", 3)),
        (["decode=sampled"], ("dynamic", 2)),
        (["decode.temperature=1"], ("dynamic", 2)),
        (["decode=plain"], ("dynamic", 2)),
    ],
)
def test_a_chosen_option_of_decode_sets_the_draft(
    target: TargetModel, in_folder: Path, given: list[str], draft: tuple[str, int]
) -> None:
    train_folder(target, "mine", {"shape": "dynamic", "depth": 2})
    settings = load_settings(STAGES["measure"], given)
    found, asked = drafters.find("mine", RUN), drafters.asked_draft(settings)
    own = drafters.draft_settings(found, settings.decode, asked)
    assert (own.shape, own.depth) == draft


def test_a_measurement_takes_all_trained_drafters_and_the_kinds(
    target: TargetModel, in_folder: Path
) -> None:
    with pytest.raises(
        UserError, match="there is nothing to measure: 'outputs/x' has no trained drafter"
    ):
        chosen(MeasureConfig(kinds=()), RUN)
    train_folder(target, "b")
    train_folder(target, "a")
    assert [item.name for item in chosen(MeasureConfig(), RUN)] == ["a", "b", "ngram"]
    assert [item.name for item in chosen(MeasureConfig(drafters=("b",), kinds=()), RUN)] == ["b"]
    with pytest.raises(
        UserError, match=r"measure\.drafts names 'c', which is not measured\. Measured: a, b, ngram"
    ):
        chosen(MeasureConfig(drafts={"c": {"depth": 2}}), RUN)


def test_a_push_needs_to_know_which_drafter(target: TargetModel, in_folder: Path) -> None:
    with pytest.raises(UserError, match="there is no run 'x' in 'outputs'"):
        choose(RUN)
    RUN.directory.mkdir(parents=True)
    with pytest.raises(UserError, match="'outputs/x' holds no trained drafter"):
        choose(RUN)
    train_folder(target, "b")
    assert [found.name for found in choose(RUN)] == ["b"]
    train_folder(target, "a")
    with pytest.raises(UserError, match=r"Say which with run\.drafter=<name>, or all: a, b"):
        choose(RUN)
    assert [found.name for found in choose(RunConfig(name="x", drafter="a"))] == ["a"]
    assert [found.name for found in choose(RunConfig(name="x", drafter="all"))] == ["a", "b"]
    with pytest.raises(UserError, match=r"has trained no 'c'"):
        choose(RunConfig(name="x", drafter="c"))


GROUPS: dict[str, dict[str, Any]] = {name: {} for name in ("engine", "optim", "schedule", "train")}
TRAINED = {
    "kind": "medusa",
    "head": {},
    "target": {},
    "data": {"path": "generate", "manifest_sha256": ""},
    "checkpoint": "best",
    "steps": 1,
    "ended_by": "steps",
    "tokens": 1,
    "seconds": 1.0,
    "processes": 1,
    "history": "log.jsonl",
    "summary": "summary.json",
    "settings": GROUPS,
}


def test_a_sweeps_best_training_stands_for_its_row(target: TargetModel, in_folder: Path) -> None:
    for name, tau in (("m@0.001", 1.2), ("m@0.01", 1.4), ("m@0.1", None), ("other", 1.0)):
        folder = train_folder(target, name)
        best = {"step": 1, "tau": tau, "tau_ci95": None}
        write_manifest(folder, "train", {**TRAINED, "best": best})
    train_folder(target, "unfinished@0.01")
    found = drafters.best_of_sweeps(drafters.list_trained(RUN))
    assert [(item.name, item.checkpoint.parent.name) for item in found if item.checkpoint] == [
        ("m", "m@0.01"),
        ("other", "other"),
    ]
    assert drafters.find("m", RUN) == found[0]
    assert choose(RunConfig(name="x", drafter="m")) == [found[0]]
    assert choose(RunConfig(name="x", drafter="all")) == found
    assert drafters.find("m@0.001", RUN).name == "m@0.001"
    with pytest.raises(UserError, match=r"Did you mean 'unfinished@0\.01'"):
        drafters.find("unfinished", RUN)
    # chat and serve take the row that was measured to be fastest, under its name
    for speed, fastest in ((1.1, "other"), (3.0, "m")):
        speeds = {"m": speed, "other": 2.0}
        rows = [{"draft": {"name": name}, "speedup": value} for name, value in speeds.items()]
        write_json(RUN.directory / "measure" / REPORT_FILE, example_report(*rows))
        assert drafters.preferred(RUN)[0] == fastest
    assert drafters.find("m", RUN).checkpoint == found[0].checkpoint
    # another drafter may have the row's name
    train_folder(target, "m")
    both = drafters.best_of_sweeps(drafters.list_trained(RUN))
    assert [item.name for item in both] == ["m", "m@0.01", "other"]


def test_a_jointly_trained_drafter_is_measured_only_by_name(
    target: TargetModel, in_folder: Path
) -> None:
    """It belongs to the target that its training made; measured beside the run's others it would be
    refused."""
    train_folder(target, "plain")
    folder = train_folder(target, "joint")
    (folder / "config.yaml").write_text(yaml.safe_dump({"joint": {"mode": "lora"}}))
    assert list(drafters.list_trained(RUN)) == ["plain"]
    assert drafters.find("joint", RUN).name == "joint"
