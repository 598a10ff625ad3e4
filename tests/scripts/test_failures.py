"""Exceptions that end a command: one sentence for those that a person can do something about, a
short report for the others."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from heads.api.errors import UserError
from heads.api.system_errors import SPELT, WORDS
from inference.manifest import write_bytes
from scripts import cli
from scripts.run import failures


def raised(error: BaseException) -> BaseException:
    """The error with a traceback."""
    try:
        raise error
    except type(error) as caught:
        return caught


def test_errors_of_files_are_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cases = {
        tmp_path / "file" / "x": "something of that name is there already",
        tmp_path / ("x" * 300): "longer than the file system allows",
        Path("/proc/nothing") / "x": "no such file or folder",
    }
    for path, words in cases.items():
        with pytest.raises(OSError) as caught:
            write_bytes(path, b"content")
        said = failures.complaint(caught.value)
        assert said is not None and words in said and "\n" not in said
        assert str(path.parent)[:20] in said


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.EROFS, "'/a/b': this file system is read-only. Give a place that can be written"),
        (errno.EACCES, "'/a/b': access is not allowed. Change the permissions"),
        (errno.ENOSPC, "'/a/b': the disk is full. What was complete is kept."),
        (errno.EDQUOT, "'/a/b': your quota of this disk is used up. What was complete is kept."),
        (errno.EISDIR, "'/a/b': there is a folder where a file is needed. Move it away"),
        (errno.ENAMETOOLONG, "'/a/b': a name is longer than the file system allows."),
        (errno.EMFILE, "'/a/b': too many files are open. Raise the limit (`ulimit -n 4096`)"),
    ],
)
def test_what_a_place_refuses_is_told_with_what_to_do(
    number: int, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(given: list[str]) -> int:
        raise OSError(number, os.strerror(number), "/a/b")

    monkeypatch.setattr(cli, "dispatch", fail)
    assert cli.main(["train"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"headstart: {words}") and said.count("\n") == 1


@pytest.mark.parametrize("number", SPELT)
def test_a_library_that_wraps_what_the_disk_refuses_is_understood(number: int) -> None:
    error = raised(RuntimeError(f"I/O error: {os.strerror(number)} (os error {number})"))
    assert WORDS[number][0] in str(failures.complaint(error))


LIMITED = """
import resource, sys
from pathlib import Path
import torch
from safetensors.torch import save_file
from heads.api.tensors import write_tensors
from scripts.run import failures
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    (write_tensors if sys.argv[2] == "ours" else save_file)({"a": torch.zeros(10000)}, Path(sys.argv[1]))
except BaseException as error:
    print(failures.complaint(error))
"""


@pytest.mark.parametrize("writer", ["ours", "the library's"])
def test_a_limit_on_the_size_of_files_is_told_also_where_a_library_meets_it(
    tmp_path: Path, writer: str
) -> None:
    command = [sys.executable, "-c", LIMITED, str(tmp_path / "a.safetensors"), writer]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "a file became larger than the system allows" in done.stdout
    assert "ulimit -f" in done.stdout
    assert (f"'{tmp_path / 'a.safetensors'}':" in done.stdout) == (writer == "ours")


def test_memory_that_is_not_there_is_one_sentence() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**50)
    said = failures.complaint(caught.value)
    assert said is not None and said.startswith("there is not enough memory (")
    assert failures.complaint(MemoryError()) is not None


def test_faults_of_ours_are_no_complaints() -> None:
    for error in (KeyError("a"), RuntimeError("b"), OSError("no number"), AssertionError()):
        assert failures.complaint(error) is None
    assert failures.complaint(UserError("said")) == "said"


def test_an_unexpected_exception_ends_with_a_short_report(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def fail(given: list[str]) -> int:
        raise KeyError("weights of\nlayer 3")

    monkeypatch.setattr(cli, "dispatch", fail)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert cli.main(["train", "optim.lr=1 2"]) == 4
    said = capsys.readouterr().err
    assert said.count("\n") == 3 and "Traceback" not in said
    assert said.startswith("headstart: KeyError: ")
    (file,) = tmp_path.iterdir()
    assert str(file) in said
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    written = file.read_text()
    assert "headstart train 'optim.lr=1 2'" in written
    assert "Traceback (most recent call last)" in written and "in fail" in written


def test_the_cause_is_shown_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "dispatch", lambda given: raised(KeyError("a")) and 1 / 0)
    monkeypatch.setenv(cli.DEBUG_VARIABLE, "1")
    with pytest.raises(ZeroDivisionError):
        cli.main([])


def test_an_argument_that_is_no_text_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "run.name=\udcff"]) == 2
    assert "argument 2 ('run.name=\\udcff') is not text in UTF-8" in capsys.readouterr().err


def test_a_run_below_a_file_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    for root in (tmp_path / "file", tmp_path / ("x" * 300)):
        status = cli.main(["generate", f"run.root={root}", "debug=fast", "target=embedded"])
        said = capsys.readouterr().err
        assert status == 2 and said.startswith("headstart: ") and "Traceback" not in said
