"""Shell completion: what follows a line, and what bash makes of it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from scripts.cli import main
from scripts.config.completion import complete


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("headstart tr", ["traffic", "train"]),
        ("headstart train hea", ["head.", "head="]),
        ("headstart train head=ea", ["head=eagle", "head=eagle3", "head=early_exit"]),
        ("headstart train head=eagle3,med", ["head=eagle3,medusa"]),
        ("headstart train head=eagle3 head.ttt", ["head.ttt_steps="]),
        ("headstart train optim.c", ["optim.clip="]),
        ("headstart train engine.name=", ["engine.name=deepspeed", "engine.name=torch"]),
        ("headstart train run.overwrite=t", ["run.overwrite=true"]),
        (
            "headstart train decode.compile=",
            [f"decode.compile={x}" for x in ("auto", "false", "true")],
        ),
        ("headstart import import.layout=e", ["import.layout=eagle", "import.layout=eagle3"]),
        ("headstart export engine=v", ["engine=vllm"]),
        ("headstart export he", ["head="]),
        ("headstart train --cfg ", ["all", "hydra", "job"]),
        ("headstart train --help opt", ["optim"]),
        ("headstart train ~exp", ["~experiment"]),
        ("headstart train hydra/sw", ["hydra/sweeper/sampler=", "hydra/sweeper="]),
        ("headstart train --mu", ["--multirun"]),
        ("headstart help rep", ["report"]),
        ("headstart nothing x", []),
    ],
)
def test_what_follows(line: str, expected: list[str]) -> None:
    assert complete(line) == sorted(expected)


def test_runs_drafters_and_files_are_found(in_folder: Path) -> None:
    for name in ("first/train/medusa", "second/train/eagle3"):
        Path("outputs", name).mkdir(parents=True)
    Path("prompts.jsonl").touch()
    assert complete("headstart measure run.name=s") == ["run.name=second"]
    assert complete("headstart chat run.name=second chat.drafter=") == ["chat.drafter=eagle3"]
    assert complete("headstart loop data.path=pr") == ["data.path=prompts.jsonl"]


def test_bash_completes_a_value_after_the_equals_sign(
    environment: dict[str, str], in_folder: Path
) -> None:
    script = """
        eval "$(headstart -sc install=bash)"
        COMP_LINE='headstart train head=eagle3 head.ttt'; COMP_POINT=${#COMP_LINE}
        _headstart; printf '<%s>' "${COMPREPLY[@]}"
        COMP_LINE='headstart train head=eagle3'; COMP_POINT=${#COMP_LINE}
        _headstart; printf '<%s>' "${COMPREPLY[@]}"
        complete -p headstart
        eval "$(headstart -sc uninstall=bash)"; complete -p headstart || echo gone
    """
    done = subprocess.run(
        ["bash", "-c", script], env=environment, capture_output=True, text=True, timeout=120
    )
    assert "<head.ttt_steps=><eagle3 >" in done.stdout, done.stderr
    assert "-F _headstart headstart" in done.stdout
    assert done.stdout.endswith("gone\n")


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
def test_zsh_takes_the_words(environment: dict[str, str], in_folder: Path) -> None:
    """compadd works inside a completion only, so this one writes down what it is given."""
    script = """
        autoload -Uz compinit && compinit -u -d ./zcompdump
        eval "$(headstart -sc install=zsh)"
        compadd() { shift 4; printf '<%s>' "$@"; }
        LBUFFER='headstart train head=eagle3 head.ttt'; _headstart
        LBUFFER='headstart train head=eagle3'; _headstart
        LBUFFER='headstart nothing x'; _headstart
        echo; echo "bound: $_comps[headstart]"
        eval "$(headstart -sc uninstall=zsh)"; echo "after: $_comps[headstart]"
    """
    done = subprocess.run(
        ["zsh", "-f", "-c", script], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.stdout.splitlines() == [
        "<head.ttt_steps=><head=eagle3 >",
        "bound: _headstart",
        "after: ",
    ], done.stderr


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
def test_fish_takes_the_words(environment: dict[str, str], in_folder: Path) -> None:
    script = """
        headstart -sc install=fish | source
        complete -C 'headstart train head=eagle3 head.ttt'
        complete -C 'headstart train head=eagle'
        headstart -sc uninstall=fish | source
        echo after; complete -C 'headstart train head=eagle'
    """
    own = {**environment, "HOME": str(in_folder), "XDG_CONFIG_HOME": str(in_folder)}
    done = subprocess.run(
        ["fish", "--no-config", "-c", script], env=own, capture_output=True, text=True, timeout=300
    )
    lines = [line.split("\t")[0] for line in done.stdout.splitlines()]
    assert lines == ["head.ttt_steps=", "head=eagle", "head=eagle3", "after"], done.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_shell_asks_for_its_words(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["-sc", f"install={shell}"]) == 0
    text = capsys.readouterr().out
    assert f"-sc query={shell}" in text
    assert "{" not in text.replace("${", "").replace("_headstart() {", "")
