"""A run, drafter or checkpoint that does not exist is an error that names what is there."""

from __future__ import annotations

from pathlib import Path

import pytest

from heads.api.errors import UserError, missing_folder
from scripts.cli import main
from scripts.config.stage_configs import RunConfig
from scripts.run.folder import missing_run, require_run


@pytest.fixture
def runs(in_folder: Path) -> Path:
    """A folder with two runs, of which one has a training without a checkpoint."""
    (in_folder / "outputs" / "demo" / "train" / "medusa").mkdir(parents=True)
    (in_folder / "outputs" / "qwen3").mkdir()
    return in_folder


@pytest.mark.parametrize(
    ("command", "hint"),
    [
        ("measure run.name=demmo", "measure.drafters=[<checkpoint folder>]"),
        ("audit run.name=demmo", "audit.drafters"),
        ("report run.name=demmo", "report.reports"),
        ("chat run.name=demmo", "chat.drafter=none"),
        ("serve run.name=demmo", "serve.drafter=none"),
        ("tune run.name=demmo", ""),
        ("tune run.name=demmo tune.drafter=medusa", ""),
        ("watch run.name=demmo watch.drafter=medusa", ""),
        ("refresh run.name=demmo refresh.drafter=medusa", ""),
        ("traffic run.name=demmo traffic.file=x.jsonl", "traffic.drafters"),
        ("feedback run.name=demmo", ""),
        ("train run.name=demmo", "headstart generate run.name=demmo"),
        ("features run.name=demmo", "headstart generate run.name=demmo"),
        ("train -m run.name=demmo optim.lr=1e-3,1e-4", "headstart generate run.name=demmo"),
        ("export run.name=demmo", ""),
        ("push run.name=demmo push.repo=a/b", ""),
    ],
)
def test_a_run_that_does_not_exist_is_refused(
    runs: Path, command: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command.split()) == 2
    message = capsys.readouterr().err
    near = (
        "there is no run 'demmo' in 'outputs'. Did you mean 'demo'? Runs in 'outputs': demo, qwen3."
    )
    assert near in message
    assert hint in message
    assert not Path("outputs/demmo").exists()  # and none is made


def test_a_run_that_nobody_named_may_be_new(in_folder: Path) -> None:
    require_run(RunConfig())
    assert (
        missing_run(RunConfig(name="x"))
        == "there is no run 'x' in 'outputs'. Runs in 'outputs': nothing."
    )
    Path("outputs/x").mkdir(parents=True)
    require_run(RunConfig(name="x"))


def test_a_new_run_may_measure_checkpoints_from_elsewhere(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It gets as far as the checkpoint, which is named."""
    elsewhere = "outputs/demo/train/medsua/best"
    assert main(["measure", "run.name=new", f"measure.drafters=[{elsewhere}]"]) == 2
    message = capsys.readouterr().err
    assert f"there is no folder '{elsewhere}'. Did you mean 'medusa'?" in message
    assert "'outputs/demo/train' holds: medusa." in message


def test_a_missing_folder_is_told_from_where_on(tmp_path: Path) -> None:
    assert missing_folder(tmp_path / "a" / "b") == f"there is no folder '{tmp_path / 'a' / 'b'}'."
    for number in range(30):
        (tmp_path / f"run{number}").mkdir()
    text = missing_folder(tmp_path / "rnu7" / "best")
    assert "Did you mean 'run" in text
    assert "holds" not in text  # too many to list


def test_answers_elsewhere_that_are_not_there(
    in_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "run.answers=nowhere"]) == 2
    assert "run.answers: there is no folder 'nowhere'" in capsys.readouterr().err
    with pytest.raises(UserError, match="there is no run 'y'"):
        require_run(RunConfig(name="y"))
