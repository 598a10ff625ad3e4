"""Trackio on this machine, read back with its own reader."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from heads.api.errors import UserError
from train.tracking.tracker import Tracker, TrackerConfig

REPOSITORY = Path(__file__).resolve().parents[4]
READ = """
import json, sys
from pathlib import Path
from tests.train.tracking.services.a_run import track
out = Path(sys.argv[1])
length = track(out, trackio=True, artifact=True)
track(out, trackio=True, length=length, first=2)  # the same command after a kill
import trackio
api = trackio.Api()
runs = list(api.runs("headstart"))
from trackio.sqlite_storage import SQLiteStorage
logs = SQLiteStorage.get_logs("headstart", runs[0].name)
blobs = [path.read_bytes() for path in Path(sys.argv[2], "artifacts").rglob("*") if path.is_file()]
kept = (out / "best" / "config.json").read_bytes() in blobs
names = [run.name for run in runs]
print(json.dumps({"runs": names, "config": runs[0].config, "logs": logs, "kept": kept}))
"""


@pytest.mark.skipif(find_spec("trackio") is None, reason="trackio is not installed")
def test_a_run_with_its_group_figures_table_and_checkpoint(tmp_path: Path) -> None:
    """In a process of its own: Trackio reads TRACKIO_DIR when it is imported."""
    store = tmp_path / "store"
    done = subprocess.run(
        [sys.executable, "-c", READ, str(tmp_path / "out"), str(store)],
        cwd=REPOSITORY,
        env={**os.environ, "TRACKIO_DIR": str(store), "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("\n") == 1, "it is silent"
    found = json.loads(done.stdout)
    assert found["runs"] == ["demo/eagle3"]
    config = found["config"]
    assert (config["_Group"], config["job_type"], config["kind"]) == ("demo", "train", "eagle3")
    assert "hf_abcdef" not in done.stdout
    figures = {name for line in found["logs"] for name in line}
    assert {"loss", "cost/mfu", "tau", "best/tau", "best/step", "transcripts"} <= figures
    best = [line["best/tau"] for line in found["logs"] if "best/tau" in line]
    assert set(best) == {2.0}
    assert found["kept"], "the checkpoint's files"


def test_without_trackio_the_error_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "trackio", None)
    config = TrackerConfig(wandb="disabled", trackio=True)
    with pytest.raises(UserError, match=r"trackio is not installed.*\.\[trackio\]"):
        Tracker(config, tmp_path, length=0, settings={})
