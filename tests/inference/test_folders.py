"""Whose a folder is: nothing of another stage, or of somebody else, is deleted or replaced."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from heads.api.errors import UserError
from inference.folders import delete_own, replace_folder, require_folder_name, stage_of
from inference.manifest import file_entry, write_json, write_manifest


def contents(folder: Path) -> dict[str, bytes | None]:
    """Everything below a folder, by relative path; None for folders."""
    return {
        path.relative_to(folder).as_posix(): None if path.is_dir() else path.read_bytes()
        for path in sorted(folder.rglob("*"))
    }


def listed(folder: Path, stage: str = "push") -> Path:
    """A folder whose manifest lists its only file."""
    folder.mkdir(parents=True)
    (folder / "weights").write_text("old")
    write_manifest(folder, stage, {"files": [file_entry(folder, "weights")]})
    return folder


def recorded(folder: Path, stage: str) -> Path:
    """A stage's folder with a result in it."""
    write_json(folder / "run.json", {"format": 1, "stage": stage})
    (folder / "result").write_text("something")
    return folder


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a/b", "/", "../a", "a\\b", "a\0b", "a\nb", "train/medusa"]
)
def test_a_name_that_is_not_one_folder_is_refused(name: str) -> None:
    with pytest.raises(UserError, match=r"(?s)measure\.name: .* must be a plain folder name"):
        require_folder_name("measure.name", name)


@pytest.mark.parametrize(
    "name", ["measure", "eagle3@0.001", "a b", ".hidden", "...", "grün", "lr=1e-3"]
)
def test_other_names_are_folders(name: str) -> None:
    assert require_folder_name("measure.name", name) == name


def test_only_an_empty_default_may_be_empty() -> None:
    assert require_folder_name("run.drafter", "", empty=True) == ""


def test_a_record_says_whose_a_folder_is(tmp_path: Path) -> None:
    assert stage_of(tmp_path / "nowhere") == stage_of(tmp_path) == ""
    assert stage_of(recorded(tmp_path / "a", "train")) == "train"
    assert stage_of(listed(tmp_path / "b")) == "push"
    write_json(tmp_path / "c" / "headstart_export.json", {"files": {}})
    assert stage_of(tmp_path / "c") == "export"
    write_json(tmp_path / "d" / "manifest.json", {"name": "a browser's extension"})
    assert stage_of(tmp_path / "d") == ""
    (tmp_path / "a" / "run.json").write_text('{"format": 1')
    with pytest.raises(UserError, match=r"run\.json' is broken"):
        stage_of(tmp_path / "a")


def test_a_stage_deletes_its_own_folder_and_no_other(tmp_path: Path) -> None:
    own = recorded(tmp_path / "own", "measure")
    (own / "records").mkdir()
    (own / "records" / "shard").write_text("1")
    delete_own(own, "measure", "run.overwrite")
    assert not own.exists()
    delete_own(own, "measure", "run.overwrite")  # absent: nothing to do
    other, foreign, nested = (
        recorded(tmp_path / "other", "train"),
        tmp_path / "foreign",
        recorded(tmp_path / "n", "measure"),
    )
    recorded(nested / "deep" / "medusa", "train")
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("ten years")
    link = tmp_path / "link"
    link.symlink_to(recorded(tmp_path / "linked", "measure"))
    before = contents(tmp_path)
    for folder, words in (
        (other, "stage 'train' wrote it, not 'measure'"),
        (foreign, "is not a stage folder and is not deleted"),
        (nested, r"deep/medusa' in it was written by stage 'train'"),
        (link, "is not a folder but a link or a file"),
        (foreign / "thesis.txt", "is not a folder but a link or a file"),
    ):
        with pytest.raises(UserError, match=words):
            delete_own(folder, "measure", "run.overwrite")
    assert contents(tmp_path) == before


def test_a_folder_is_replaced_when_the_new_one_is_complete(tmp_path: Path) -> None:
    out = listed(tmp_path / "out")
    (out / "__pycache__").mkdir()
    (out / "__pycache__" / "a.pyc").write_text("compiled")
    for stranger in ("out.partial", f"out.{os.getpid()}-0123abcd@{socket.gethostname()}.partial"):
        (tmp_path / stranger).mkdir()
        (tmp_path / stranger / "chapter").write_text("1")
    dead = tmp_path / f"out.{2**22 + 1}-0123abcd@{socket.gethostname()}.partial"
    dead.mkdir()
    before = contents(tmp_path)

    def failing() -> None:
        with replace_folder(out, "push", "push") as fresh:
            (fresh / "weights").write_text("half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        failing()
    del before[dead.name]
    assert contents(tmp_path) == before  # and the dead writer's folder is gone
    with replace_folder(out, "push", "push") as fresh:
        (fresh / "weights").write_text("new")
        assert (out / "weights").read_text() == "old"
    assert contents(out) == {"weights": b"new"}
    assert (tmp_path / "out.partial" / "chapter").exists()


def test_a_file_that_the_record_does_not_list_keeps_its_folder(tmp_path: Path) -> None:
    out = listed(tmp_path / "out")
    (out / "sub").mkdir()
    (out / "sub" / "notes.txt").write_text("mine")
    before = contents(tmp_path)
    words = r"holds files that stage 'push' did not write: sub/notes\.txt"
    with pytest.raises(UserError, match=words), replace_folder(out, "push", "push"):
        raise AssertionError("nothing is built for a folder that cannot be replaced")
    assert contents(tmp_path) == before
    with replace_folder(out, "push", "push", beside=("sub/notes.txt",)):
        pass
    assert contents(tmp_path) == {"out": None}


@pytest.mark.parametrize("out", [".", "..", "/"])
def test_a_folder_without_a_name_is_not_replaced(out: str, in_folder: Path) -> None:
    with (
        pytest.raises(UserError, match="is not a name for a new folder"),
        replace_folder(Path(out), "export", "export.out"),
    ):
        pass
