"""The command line: help without torch, one clear message for a mistake, suggestions, exit
statuses."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import get_type_hints

import pytest
import yaml
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from heads.api.kinds import kind_names
from heads.api.registry import get_kind
from scripts.cli import main
from scripts.config.fields import Field, group_fields, kind_fields, leaves, spelt
from scripts.config.schema import group_classes, plain
from scripts.config.stages import STAGES, Stage
from tests import forked


def headstart(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own."""
    return forked.run("scripts.cli", *arguments, env={**os.environ, **environment})


def test_help_answers_within_a_second() -> None:
    taken = []
    for _ in range(3):  # the best of three: the machine may be busy
        start = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", "scripts.cli", "--help"],
            capture_output=True,
            text=True,
            timeout=120,
            cwd=Path(__file__).parents[2],
        )
        taken.append(time.perf_counter() - start)
    assert done.returncode == 0
    assert min(taken) < 1.0
    for stage in STAGES.values():
        assert f"{stage.name} " in done.stdout
        assert stage.summary in done.stdout


def test_help_does_not_import_torch() -> None:
    program = (
        "import sys\n"
        "from scripts.cli import main\n"
        "assert main(['--help']) == 0\n"
        f"for name in {list(STAGES)}:\n"
        "    assert main([name, '--help']) == 0, name\n"
        "heavy = {'torch', 'transformers', 'datasets', 'deepspeed', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_stage_help_lists_groups_options_and_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "head=eagle3", "--help"]) == 0
    text = capsys.readouterr().out
    assert "eagle3*" in text
    assert "medusa" in text
    assert "optim.lr = " in text
    assert "Peak learning rate" in text  # the docstring under the field
    assert "head.kind = eagle3" in text
    assert "bench" not in text.split("keys")[0]  # train does not read it


def test_help_follows_imports_and_names_the_keys_below_a_key(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["measure", "bench=profile", "--help", "all"]) == 0
    text = capsys.readouterr().out
    # its dataclass is imported into the module that the group names
    assert "decode.temperature = 0.0" in text
    assert "bench.profile.batches = [1, 4, 16, 32]" in text
    assert "bench.costs.repeats = 15" in text  # a default, two levels down
    assert "Timed calls per point" in text
    assert "bench.profile = " not in text
    assert main(["plan", "--help", "plan"]) == 0
    assert "plan.mfu = 0.35" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("headstart ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "there is no stage 'trian'. Did you mean 'train'?"),
        (["train", "head=medsua"], "head=medsua: there is no such option. Did you mean 'medusa'?"),
        (["train", "target=Qwen/Qwen3-8B"], "For a model of your own: target=local target.path="),
        (["train", "optim.lrr=1"], "optim.lrr: there is no such key. Did you mean 'lr'?"),
        (["train", "+optim.lrr=1"], "optim.lrr: there is no such key. Did you mean 'lr'?"),
        (["train", "+head.x=1"], "head.x: there is no such key."),
        (["train", "optim.lr=fast"], "optim.lr: expected a number, given 'fast' (text)."),
        (["train", "optm.lr=1"], "there is no group 'optm'. Did you mean 'optim'?"),
        (
            ["train", "head.kind=medsua"],
            "head.kind: there is no drafter kind 'medsua'. Did you mean 'medusa'?",
        ),
        (["train", "target=local"], "target.path is missing. Give it as target.path=... (text)."),
        (["train", "bench.repeats=2"], "stage 'train' does not read 'bench'."),
        (["train", "head=medusa,eagle3"], "Add -m to run once per value"),
        (
            ["train", "-m", "head=medusa"],
            "-m runs a stage for several values, but none are listed.",
        ),
        (["train", "--hed"], "there is no flag '--hed'. Did you mean '--help'?"),
        (["train", "--lr", "1e-3"], "Settings are given without dashes: optim.lr=..."),
        (["train", "--optim.lr=1e-3"], "Settings are given without dashes: optim.lr=1e-3"),
        (["train", "lr=1e-3"], "there is no group 'lr'. Did you mean optim.lr=1e-3?"),
        (["train", "overwrite=true"], "Did you mean run.overwrite=true?"),
        (["train", "--help", "optm"], "does not read such a group. Did you mean 'optim'?"),
        (["train", "--cfg"], "--cfg is to be followed by one of job, hydra, all."),
        (["train", "--cfg", "jobs"], "--cfg jobs: unknown. Did you mean 'job'?"),
        (["train", "--cfg", "job", "-m"], "--multirun and --cfg do not go together"),
        (["train", "--config", "x", "--help"], "--help does not read the file of --config."),
        (["train", "--config", "x", "--cfg", "job"], "--cfg does not read the file of --config."),
        (["train", "--config", "x", "--info"], "--info does not read the file of --config."),
        (["train", "--resolve"], "--resolve and --package go with --cfg"),
        (["train", "--config-name", "x"], "--config-name is not for this program."),
        (["train", "--config-dir", "nowhere"], "--config-dir: 'nowhere' is not a folder."),
        (["-sc", "install=tcsh"], "'tcsh' is none of them."),
        (["train", "hydra/launcher=basic"], "add -m and list values"),
        (["train", "-m", "hydra/launcher=slurm", "head=medusa,eagle3"], "no such option."),
        (["train", "-m", "optim.lr=interval(0,1)"], "is an interval, which hydra/sweeper=optuna"),
        (
            ["train", "-m", "--show", "hydra/sweeper=optuna", "optim.lr=interval(0,1)"],
            "hydra/sweeper=optuna chooses the values of its jobs while they run",
        ),
        (["train", "-m", "head=glob(x*)"], "matches no option"),
        (["train", "head@other=medusa"], "options cannot be put elsewhere"),
        (["train", "optim"], "'optim' is not a setting."),
        (["train", "optim=3"], "optim=3: there is no such option."),
        (["train", "optim.lr=[1"], "'optim.lr=[1' cannot be read"),
        (["train", "~optim.lr=3"], "the configuration of 'train' cannot be composed"),
        (["train", "~optm"], "there is no group 'optm'. Did you mean 'optim'?"),
        (["train", "run.name=a/b"], "run.name: 'a/b' must be a plain folder name"),
        (
            ["train", "experiment=demmo"],
            "experiment=demmo: there is no such option. Did you mean 'demo'?",
        ),
    ],
)
def test_a_mistake_is_one_message(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], in_folder: Path
) -> None:
    assert main(arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("headstart: ")
    assert shown.err.count("\n") == 1
    assert message in shown.err


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ([], "the same command continues"),
        (["run.overwrite=false"], "the same command continues"),
        (["run.overwrite=true"], "the same command without run.overwrite=true continues"),
        (["++run.overwrite=True"], "the same command without run.overwrite=true continues"),
    ],
)
def test_an_interrupted_command_says_what_continues_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], more: list[str], words: str
) -> None:
    def interrupt(given: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("scripts.cli.dispatch", interrupt)
    assert main(["train", *more]) == 130
    assert f"interrupted; {words} where this one stopped." in capsys.readouterr().err


def test_torchruns_report_of_a_failure_shows_the_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read as torchrun itself reads it."""
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    assert main(["train", "optim.lr=much"]) == 2
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=2, error_file=str(file))
    report = ChildFailedError("headstart", {0: failure}).format_msg()
    assert "optim.lr" in report and "much" in report
    assert "To enable traceback" not in report


def test_the_traceback_appears_only_on_request() -> None:
    quiet, loud = headstart("train", "head=x"), headstart("train", "head=x", HEADSTART_DEBUG="1")
    assert quiet.returncode == 2
    assert "Traceback" not in quiet.stderr
    assert loud.returncode == 1
    assert "Traceback" in loud.stderr


def test_show_prints_the_composed_settings(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "-m", "head=medusa,eagle3", "optim.lr=0.5", "--show"]) == 0
    text = capsys.readouterr().out
    assert text.count("lr: 0.5") == 2
    assert "kind: medusa" in text
    assert "kind: eagle3" in text


def test_what_is_shown_has_all_defaults_or_only_what_differs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["train", "optim.lr=0.5", "train.tracker.project=mine", "--show"]) == 0
    whole = yaml.safe_load(capsys.readouterr().out)
    assert set(whole) == set(STAGES["train"].groups)
    assert whole["optim"] == {
        "kind": "adamw",
        "lr": 0.5,
        "momentum": 0.95,
        "betas": [0.9, 0.95],
        "eps": 1e-8,
        "weight_decay": 0.0,
        "clip": 1.0,
    }
    assert whole["head"]["kind"] == "medusa"
    assert {"num_heads", "num_layers"} <= set(whole["head"])  # no YAML file sets all of them
    arguments = ["optim.lr=0.5", "optim.clip=1.0", "train.tracker.project=mine"]
    assert main(["train", *arguments, "--show=changed"]) == 0
    changed = yaml.safe_load(capsys.readouterr().out)
    assert changed["optim"] == {"lr": 0.5}  # what is given but equal is no change
    assert changed["train"]["tracker"] == {"project": "mine"}
    assert changed["head"] == {"kind": "medusa"}
    assert "schedule" not in changed
    # what is shown can be given back
    assert main(["train", "optim.lr=0.5", "train.tracker.project=mine", "--show", "all"]) == 0
    assert yaml.safe_load(capsys.readouterr().out) == whole


def test_help_of_a_group_of_everything_and_of_what_is_set_most(
    capsys: pytest.CaptureFixture[str],
) -> None:
    texts = {}
    for topic in ("", "optim", "all"):
        assert main(["help", "train", *([topic] if topic else [])]) == 0
        texts[topic] = capsys.readouterr().out
    assert texts["optim"].startswith("optim: AdamW")
    assert "optim.betas = " in texts["optim"]
    assert "train." not in texts["optim"]
    assert "optim.betas = " in texts["all"]
    assert "optim.betas = " not in texts[""]
    assert len(texts[""].splitlines()) < 80 < len(texts["all"].splitlines())


@pytest.mark.parametrize("stage", STAGES.values(), ids=lambda stage: stage.name)
def test_the_keys_set_most_often_exist(stage: Stage) -> None:
    for key in stage.common:
        group, *below = key.split(".")
        assert group in stage.groups
        found = dict(leaves(group, group_fields(group, {"kind": "medusa"})))
        assert ".".join([group, *below]) in found


@pytest.mark.parametrize("group", [*group_classes(), *(f"head={kind}" for kind in kind_names())])
def test_help_has_every_key_once_with_its_default(group: str) -> None:
    """As read from the source, against the classes themselves."""
    if kind := group.partition("=")[2]:
        require_same(get_kind(kind).config_class, kind_fields(kind))
    else:
        require_same(group_classes()[group], group_fields(group, {}))


def require_same(cls: type, shown: Sequence[Field]) -> None:
    types = get_type_hints(cls)
    assert [field.name for field in shown] == [field.name for field in fields(cls)]
    for one, real in zip(shown, fields(cls), strict=True):
        if is_dataclass(types[real.name]):
            require_same(types[real.name], one.below)
        elif real.default is not MISSING:
            assert one.default == spelt(plain(real.default))


def test_a_reader_that_goes_ends_the_command_quietly() -> None:
    process = forked.start("scripts.cli", "train", "--help", apart=True)
    process.stdout.close()
    errors = process.stderr
    assert errors is not None and errors.read() == ""
    assert process.wait(60) == 141


def test_another_broken_pipe_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lose(arguments: list[str]) -> int:
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr("scripts.cli.dispatch", lose)
    assert main(["train"]) != 0
    assert "Broken pipe" in capsys.readouterr().err
