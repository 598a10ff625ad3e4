"""The revision that records name."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from scripts.run import revision


def test_a_changed_file_of_another_encoding_is_part_of_the_difference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every stage records the difference before it begins."""

    def git(*words: str) -> None:
        own = ["-c", "user.name=x", "-c", "user.email=x@y"]
        subprocess.run(["git", *own, *words], cwd=tmp_path, check=True, capture_output=True)

    notes = tmp_path / "notes.txt"
    notes.write_bytes(b"first\n")
    git("init", "-q")
    git("add", "notes.txt")
    git("commit", "-q", "-m", "notes")
    notes.write_bytes("caf\u00e9\n".encode("latin-1"))
    monkeypatch.setattr(revision, "REPOSITORY", tmp_path)
    found = revision.git_state()
    assert len(found["revision"]) == 40 and "+caf" in found["diff"]
