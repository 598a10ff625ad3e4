"""Manifests: what is refused when reading, and what a kill leaves."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import time

import pytest
from typing_extensions import TypedDict

from heads.api.errors import UserError
from inference import manifest
from tests import forked


def test_round_trip_with_provenance(tmp_path):
    manifest.write_manifest(
        tmp_path / "out", "generate", {"counts": {"done": 3}}, provenance={"command": "x"}
    )
    content = manifest.read_manifest(tmp_path / "out", "generate")
    assert content == {
        "format": 1,
        "stage": "generate",
        "counts": {"done": 3},
        "provenance": {"command": "x"},
    }


def test_missing_manifest_names_the_stage_to_run(tmp_path):
    with pytest.raises(UserError, match="headstart generate"):
        manifest.read_manifest(tmp_path, "generate")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "not readable as JSON"),
        ("[]", r"is broken: it holds \[\] in place of keys"),
        ('{"format": 2, "stage": "generate"}', "format 2"),
        ('{"format": 1, "stage": "train"}', "written by stage 'train'"),
    ],
)
def test_wrong_manifests_are_refused(tmp_path, text, problem):
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(UserError, match=problem):
        manifest.read_manifest(tmp_path, "generate")


@pytest.mark.parametrize(
    "files", [None, "all", [5], [{"file": "a"}], [{"file": 1, "sha256": "x"}], {"a": "b"}]
)
def test_a_manifest_that_lists_no_files_is_refused(tmp_path, files):
    """As of a repository that somebody else wrote."""
    (tmp_path / "manifest.json").write_text(
        json.dumps({"format": 1, "stage": "push", "files": files})
    )
    with pytest.raises(UserError, match="lists no files by path and sha256"):
        manifest.verify_listed(tmp_path, "push", ["a"])


def test_a_manifest_of_brackets_is_refused(tmp_path):
    (tmp_path / "manifest.json").write_text("[" * 200_000)
    with pytest.raises(UserError, match="not readable as JSON"):
        manifest.verify_listed(tmp_path, "push", ["a"])


class Finished(TypedDict):
    steps: int


def test_a_manifest_without_a_key_is_named(tmp_path):
    manifest.write_manifest(tmp_path, "train", {"step": 3})
    with pytest.raises(UserError, match=r"manifest\.json' is broken: steps: Field required"):
        manifest.read_manifest_as(Finished, tmp_path, "train")


def test_an_interrupted_write_leaves_the_old_manifest(tmp_path, monkeypatch):
    manifest.write_manifest(tmp_path, "generate", {"round": 0})

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(manifest.os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        manifest.write_manifest(tmp_path, "generate", {"round": 1})
    assert manifest.read_manifest(tmp_path, "generate")["round"] == 0


WRITER = """
import sys
from pathlib import Path
from inference.manifest import write_bytes
print("ready", flush=True)
sys.stdin.readline()
for number in range(50):
    write_bytes(Path(sys.argv[1]), sys.argv[2].encode() * 1000)
"""


def test_several_processes_may_write_one_file_at_once(tmp_path):
    """The last one wins, whole; none trips over another's temporary file."""
    path = tmp_path / "file"
    writers = [started(WRITER, path, letter) for letter in "abcd"]
    for writer in writers:
        assert writer.stdout.readline() == "ready\n"
    for writer in writers:
        writer.stdin.write("\n")
        writer.stdin.flush()
    assert [writer.wait() for writer in writers] == [0, 0, 0, 0]
    assert path.read_text() in {letter * 1000 for letter in "abcd"}
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_leftovers_of_killed_writers_are_removed_and_those_of_living_ones_are_not(tmp_path):
    killed = started(
        "import os, signal, sys\nfrom pathlib import Path\nfrom inference import manifest\n"
        "manifest.os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "manifest.write_bytes(Path(sys.argv[1]), b'half')",
        tmp_path / "below" / "file",
    )
    assert killed.wait() == -signal.SIGKILL
    (leftover,) = (tmp_path / "below").iterdir()
    assert leftover.name.endswith(".partial")
    host = socket.gethostname()
    living = tmp_path / f"file.{os.getpid()}-0123abcd@{host}.partial"
    elsewhere, long_ago = (
        tmp_path / "file.1-0123abcd@node7.partial",
        tmp_path / "file.2-0123abcd@node7.partial",
    )
    # of a container of the same name, where another process has this number or none
    beside = tmp_path / f"file.{2**22 + 1}-0123abcd@{host}+00000000.partial"
    other = tmp_path / "report.md.partial"
    for path in (living, elsewhere, beside, long_ago, other):
        path.touch()
    os.utime(long_ago, (time.time() - 3600,) * 2)
    manifest.remove_leftovers(tmp_path)
    assert not leftover.exists()
    assert sorted(path for path in tmp_path.iterdir() if path.is_file()) == sorted(
        [living, elsewhere, beside, other]
    )


def test_a_write_that_the_disk_refuses_leaves_nothing(tmp_path):
    path = tmp_path / "file"
    manifest.write_bytes(path, b"old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            manifest.write_bytes(path, bytes(1000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [each.name for each in tmp_path.iterdir()] == ["file"]
    assert path.read_bytes() == b"old"


def started(program, *arguments):
    """A Python program in a process of its own, with pipes to and from it."""
    return forked.start("-c", program, *arguments)


def test_listed_files_are_verified(tmp_path):
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards" / "a").write_bytes(b"one")
    entry = manifest.file_entry(tmp_path, "shards/a", rows=1)
    assert entry["sha256"] == "7692c3ad3540bb803c020b3aee66cd8887123234ea0c6e7143c0add73ff431ed"
    assert manifest.verify_file(tmp_path, entry) == tmp_path / "shards" / "a"
    (tmp_path / "shards" / "a").write_bytes(b"two")
    with pytest.raises(UserError, match="changed or damaged"):
        manifest.verify_file(tmp_path, entry)
    (tmp_path / "shards" / "a").unlink()
    with pytest.raises(UserError, match="not there"):
        manifest.verify_file(tmp_path, entry)
    with pytest.raises(UserError, match="without path or sha256"):
        manifest.verify_file(tmp_path, {"file": "shards/a"})


@pytest.mark.parametrize("escape", ["../x", "/etc/passwd", "a/../../x", "a\\..\\x", "link/x", 7])
def test_paths_that_leave_the_folder_are_refused(tmp_path, escape):
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / "link").symlink_to(tmp_path)
    (tmp_path / "x").write_text("secret")
    with pytest.raises(UserError, match="outside its folder"):
        manifest.verify_file(
            inside, {"file": escape, "sha256": manifest.file_sha256(tmp_path / "x")}
        )


def test_json_keeps_unicode_readable(tmp_path):
    manifest.write_json(tmp_path / "a.json", {"name": "Zoë"})
    text = (tmp_path / "a.json").read_text(encoding="utf-8")
    assert "Zoë" in text
    assert json.loads(text) == {"name": "Zoë"}
