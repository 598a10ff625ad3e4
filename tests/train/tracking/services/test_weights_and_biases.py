"""Weights & Biases, offline: what its files hold."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from heads.api.errors import UserError
from tests.train.tracking.services.a_run import track
from train.tracking.tracker import ID_FILE, Tracker, TrackerConfig


@pytest.fixture
def content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """All bytes of the run's files."""
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "staging"))
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
    track(tmp_path, wandb="offline", artifact=True)
    (file,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    assert file.stem == f"run-{(tmp_path / ID_FILE).read_text().strip()}"
    assert not list(tmp_path.glob("*.partial"))

    def read() -> bytes:
        files = [path for path in (tmp_path / "wandb").rglob("*") if path.is_file()]
        return b"".join(path.read_bytes() for path in files)

    end = time.monotonic() + 60
    while b"demo-eagle3" not in read() and time.monotonic() < end:
        time.sleep(0.05)  # its own process ends the file a moment after it has said so
    return read()


def test_a_run_is_told_apart_and_summarised(content: bytes) -> None:
    for word in (b"demo/eagle3", b"train", b"first-tag", b"headstart", b"loss", b"cost/mfu"):
        assert word in content, word
    for word in (b"best/tau", b"best/tau_low", b"best/step"):  # the summary
        assert word in content, word
    assert b"What is a list?" in content  # the table
    assert b"demo-eagle3" in content  # the artifact
    assert b"hf_abcdef" not in content


def test_without_the_library_the_error_names_no_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Headstart itself requires it."""
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match=r"wandb is not installed.*wandb=disabled") as refused:
        Tracker(TrackerConfig(wandb="offline"), tmp_path, length=0, settings={})
    assert "extra" not in str(refused.value)
