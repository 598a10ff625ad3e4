"""Manifests: what is refused when reading, and what a kill leaves."""

from __future__ import annotations

import json

import pytest

from heads.api.errors import UserError
from inference import manifest


def test_round_trip_with_provenance(tmp_path):
    manifest.write_manifest(
        tmp_path / "out", "generate", {"counts": {"done": 3}}, provenance={"command": "x"}
    )
    content = manifest.read_manifest(tmp_path / "out", "generate")
    assert content == {
        "format": 1, "stage": "generate", "counts": {"done": 3}, "provenance": {"command": "x"},
    }  # fmt: skip


def test_missing_manifest_names_the_stage_to_run(tmp_path):
    with pytest.raises(UserError, match="headstart generate"):
        manifest.read_manifest(tmp_path, "generate")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "not readable as JSON"),
        ("[]", "format 'list'"),
        ('{"format": 2, "stage": "generate"}', "format 2"),
        ('{"format": 1, "stage": "train"}', "written by stage 'train'"),
    ],
)
def test_wrong_manifests_are_refused(tmp_path, text, problem):
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(UserError, match=problem):
        manifest.read_manifest(tmp_path, "generate")


def test_an_interrupted_write_leaves_the_old_manifest(tmp_path, monkeypatch):
    manifest.write_manifest(tmp_path, "generate", {"round": 0})

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(manifest.os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        manifest.write_manifest(tmp_path, "generate", {"round": 1})
    assert manifest.read_manifest(tmp_path, "generate")["round"] == 0


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
        manifest.verify_file(inside, {"file": escape, "sha256": manifest.file_sha256(tmp_path / "x")})


def test_json_keeps_unicode_readable(tmp_path):
    manifest.write_json(tmp_path / "a.json", {"name": "Zoë"})
    text = (tmp_path / "a.json").read_text(encoding="utf-8")
    assert "Zoë" in text
    assert json.loads(text) == {"name": "Zoë"}
