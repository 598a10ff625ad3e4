"""Whose a folder is: nothing of another stage, or of somebody else, is deleted or replaced."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from heads.api.errors import UserError
from inference.folders import (
    FORMER,
    copy_plain,
    delete_own,
    discard,
    put,
    replace_folder,
    replace_part,
    require_folder_name,
    restore,
    stage_of,
    sweep,
)
from inference.manifest import file_entry, partial_of, write_json, write_manifest


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


@pytest.mark.parametrize("content", [b'{"format": 1', b"\xff\xfe", b"[" * 100_000, b"9" * 5000])
def test_a_folder_whose_record_is_not_readable_is_nobodys(tmp_path: Path, content: bytes) -> None:
    (recorded(tmp_path / "a", "train") / "run.json").write_bytes(content)
    words = r"run\.json' is not readable as JSON .* it is not known whose folder"
    with pytest.raises(UserError, match=words):
        stage_of(tmp_path / "a")
    with pytest.raises(UserError, match=words):
        delete_own(tmp_path / "a", "train", "run.overwrite")
    assert (tmp_path / "a" / "run.json").read_bytes() == content


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


def test_a_file_that_the_record_does_not_list_is_moved_aside(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out = listed(tmp_path / "out")
    for name in ("sub/notes.txt", "sub/more.txt"):
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).write_text("mine")
    with replace_folder(out, "push", "push", more=("sub/more.txt",)) as fresh:
        (fresh / "weights").write_text("new")
    assert contents(out) == {"weights": b"new"}
    (aside,) = tmp_path.glob("out.aside-*")
    assert contents(aside) == {"sub": None, "sub/notes.txt": b"mine"}
    assert f"moved to '{aside}': sub/notes.txt" in caplog.text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", aside.name]


def test_what_is_deleted_is_named_and_what_is_not_ours_is_moved_aside(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = recorded(tmp_path / "medusa", "train")
    (own / "result").rename(own / "log.jsonl")
    (own / "best").mkdir()
    for name in ("model.safetensors", "notes.txt"):
        (own / "best" / name).write_text(name)
    private = tmp_path / "private.txt"
    private.write_text("mine")
    (own / "link").symlink_to(private)
    delete_own(own, "train", "run.overwrite")
    assert not own.exists()
    (aside,) = tmp_path.glob("medusa.aside-*")
    assert sorted(path.name for path in aside.rglob("*")) == ["best", "link", "notes.txt"]
    assert (aside / "link").is_symlink() and private.read_text() == "mine"
    assert f"run.overwrite: deleting '{own}', which stage 'train' wrote (3 files," in caplog.text


def test_after_a_kill_a_half_deleted_folder_still_says_whose_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    write_json(folder / "run.json", {"format": 1, "stage": "learn"})
    (folder / "validation.jsonl").write_text("")
    unfinished = folder / "train.12-ab@host.partial"
    unfinished.mkdir()
    (unfinished / "state.pt").write_bytes(b"x")

    unlink = Path.unlink

    def killed(path: Path, missing_ok: bool = False) -> None:
        unlink(path)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", killed)
        with pytest.raises(KeyboardInterrupt):
            delete_own(folder, "learn", "learn")
    assert stage_of(folder) == "learn" and not (folder / "validation.jsonl").exists()
    delete_own(folder, "learn", "learn")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("part", "own"),
    [
        ("parts", "3.parquet"),
        ("shards", "shard-00000.parquet"),
        ("packed", "0123/tokens.bin"),
        ("input", "keys/7.bin"),
        ("records", "medusa/verifications-00000.parquet"),
    ],
)
def test_what_others_put_into_a_part_outlives_it(tmp_path: Path, part: str, own: str) -> None:
    folder = tmp_path / part
    for name in (own, "notes.txt", "copy/notes.txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    discard(folder)
    assert not folder.exists()
    (aside,) = tmp_path.glob(f"{part}.aside-*")
    kept = {"notes.txt": b"notes.txt", "copy": None, "copy/notes.txt": b"copy/notes.txt"}
    assert contents(aside) == kept
    discard(folder)  # nothing is there, which is no error


def test_a_part_is_replaced_whole_and_keeps_what_others_put_there(tmp_path: Path) -> None:
    best = tmp_path / "best"
    for name in ("weights", "notes.txt"):
        best.mkdir(exist_ok=True)
        (best / name).write_text("old")
    (tmp_path / "best.old").mkdir()
    (tmp_path / "best.old" / "weights").write_text("somebody's copy")
    with replace_part(best, ("weights",)) as fresh:
        (fresh / "weights").write_text("new")
    assert contents(best) == {"weights": b"new"}
    (aside,) = tmp_path.glob("best.aside-*")
    assert contents(aside) == {"notes.txt": b"old"}
    assert (tmp_path / "best.old" / "weights").read_text() == "somebody's copy"
    (tmp_path / "link").symlink_to(best)
    with pytest.raises(UserError, match="a link or a file"), replace_part(tmp_path / "link", ()):
        pass
    assert contents(best) == {"weights": b"new"}


def test_a_kill_between_the_two_renames_is_made_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    best, fresh = tmp_path / "best", tmp_path / "fresh"
    for folder in (best, fresh):
        folder.mkdir()
        (folder / "weights").write_text(folder.name)

    class KilledError(Exception):
        pass

    plain, calls = Path.rename, []

    def rename(path: Path, other: Path) -> Path:
        calls.append(path)
        if len(calls) == 2:
            raise KilledError
        return plain(path, other)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(KilledError):
        put(fresh, best)
    assert not best.exists()
    monkeypatch.setattr(Path, "rename", plain)
    restore(best)
    assert contents(best) == {"weights": b"best"}
    put(fresh, best)
    assert contents(tmp_path) == {"best": None, "best/weights": b"fresh"}


def test_what_is_on_its_way_belongs_to_one_folder_alone(tmp_path: Path) -> None:
    former = partial_of(tmp_path / "v1.1").with_suffix(FORMER)
    killed = tmp_path / f"v1.1.{2**22 + 1}-0123abcd@{socket.gethostname()}.partial"
    for folder in (former, killed):
        folder.mkdir()
        (folder / "weights").write_text("of v1.1")
    restore(tmp_path / "v1")
    assert not (tmp_path / "v1").exists() and former.is_dir()
    with replace_folder(tmp_path / "v1", "export", "export.out"):
        pass
    restore(tmp_path / "v1")  # it is there now
    assert former.is_dir() and killed.is_dir()
    restore(tmp_path / "v1.1")
    assert contents(tmp_path / "v1.1") == {"weights": b"of v1.1"}


def test_a_folder_gets_its_name_back_when_the_new_one_cannot_have_it(tmp_path: Path) -> None:
    (tmp_path / "best").mkdir()
    (tmp_path / "best" / "weights").write_text("old")
    with pytest.raises(FileNotFoundError):
        put(tmp_path / "missing", tmp_path / "best")
    assert contents(tmp_path) == {"best": None, "best/weights": b"old"}


def test_a_part_with_a_stages_record_or_a_link_is_not_discarded(tmp_path: Path) -> None:
    part = tmp_path / "parts"
    recorded(part / "deep", "train")
    (tmp_path / "link").symlink_to(part)
    before = contents(tmp_path)
    with pytest.raises(UserError, match=r"stage 'train' wrote .*parts/deep'"):
        discard(part)
    with pytest.raises(UserError, match="is a link and is not deleted"):
        discard(tmp_path / "link")
    assert contents(tmp_path) == before
    with pytest.raises(UserError, match=r"stage 'train' wrote .*parts/deep'"):
        discard(part, ("features",))
    discard(part, ("features", "train"))
    assert not part.exists()
    discard(part)
    assert not part.exists()


def test_what_killed_processes_were_writing_is_swept_away(tmp_path: Path) -> None:
    dead = f".{2**22 + 1}-0123abcd@{socket.gethostname()}.partial"
    own = f".{os.getpid()}-0123abcd@{socket.gethostname()}.partial"
    for name in (f"a{dead}", f"sub/b{own}", f"sub/c{dead}", "mine.partial"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "file").touch()
    sweep(tmp_path)
    assert sorted(path.name for path in tmp_path.rglob("*.partial")) == [f"b{own}", "mine.partial"]


def test_a_name_that_is_not_utf_8_is_not_copied(tmp_path: Path) -> None:
    source = listed(tmp_path / "a")
    Path(os.fsdecode(os.fsencode(source) + b"/notes-\xff")).touch()
    with pytest.raises(UserError, match="has a name that is not UTF-8"):
        copy_plain(source, tmp_path / "b")


def test_links_are_not_copied(tmp_path: Path) -> None:
    source, private = tmp_path / "source", tmp_path / "private"
    (source / "sub").mkdir(parents=True)
    (source / "sub" / "a").write_text("a")
    private.mkdir()
    (private / "secret").write_text("mine")
    copy_plain(source, tmp_path / "copy")
    assert contents(tmp_path / "copy") == {"sub": None, "sub/a": b"a"}
    for place in ("sub/secret", "folder"):
        link = source / place
        link.symlink_to(private / "secret" if place == "sub/secret" else private)
        with pytest.raises(UserError, match=f"{place}' is not a plain file but a link"):
            copy_plain(source, tmp_path / "other")
        link.unlink()
    assert not contents(tmp_path / "other")


@pytest.mark.parametrize("out", [".", "..", "/"])
def test_a_folder_without_a_name_is_not_replaced(out: str, in_folder: Path) -> None:
    with (
        pytest.raises(UserError, match="is not a name for a new folder"),
        replace_folder(Path(out), "export", "export.out"),
    ):
        pass
