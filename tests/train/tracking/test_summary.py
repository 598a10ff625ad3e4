"""What a training says about its cost: summary.json adds up, over sessions too; tau.png; the table,
also of a stopped run."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import matplotlib.image
import pytest

import train.setup as setup
from heads.api.errors import UserError
from tests.train.micro_run import settings
from train.distributed import join_world
from train.loop import Trainer
from train.run import train
from train.state import StateStore
from train.stopping import Stopped
from train.tracking.clock import PARTS
from train.tracking.summary import PLOT_FILE, SUMMARY_FILE, read_summary, rows
from train.tracking.tracker import LOG_FILE, read_log

LOADING = 0.2
"""Seconds by which the target is made to load longer, so that setup is more than nothing."""


@pytest.fixture(autouse=True)
def slow_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = setup.load_target

    def load(*given: Any) -> Any:
        time.sleep(LOADING)
        return plain(*given)

    monkeypatch.setattr(setup, "load_target", load)


def summary_of(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / SUMMARY_FILE).read_text(encoding="utf-8"))
    return found


def require_sums(found: dict[str, Any], processes: int = 1) -> None:
    """The figures of a summary that follow from one another."""
    assert set(found["seconds"]) == set(found["shares"]) == set(PARTS)
    assert sum(found["shares"].values()) == pytest.approx(1.0)
    assert found["wall_seconds"] == pytest.approx(sum(found["seconds"].values()))
    for part, share in found["shares"].items():
        assert share == pytest.approx(found["seconds"][part] / found["wall_seconds"])
    seconds = found["setup_seconds"] + found["wall_seconds"]
    assert found["device_hours"] == pytest.approx(seconds * processes / 3600)
    assert found["device"]["processes"] == processes


FIRST = Path(__file__).parent / "data" / "summary_first.json"
"""As the first version wrote it (commit ffee2d4)."""


def test_a_summary_of_the_first_version_is_read() -> None:
    found, written = read_summary(FIRST), json.loads(FIRST.read_text(encoding="utf-8"))
    assert found.device.trainers == found.device.processes == 1  # not in the file, like these:
    assert (found.setup_seconds, found.energy_source) == (0.0, "")
    again = found.model_dump(mode="json", exclude_unset=True)
    assert again == written
    assert ("tokens", "4,360, 2,446 per second") in rows(found)


@pytest.mark.parametrize("content", [None, "{", '{"format": 1}', '{"format": 2}'])
def test_what_is_no_summary_is_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / SUMMARY_FILE).write_text(content, encoding="utf-8")
    with pytest.raises(
        UserError, match=r"is no summary of a training|summary\.json' cannot be read: No such file"
    ):
        read_summary(tmp_path)


def test_the_figures_of_a_training_add_up(
    micro: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    begun = time.perf_counter()
    manifest = train(out=tmp_path, **settings(micro))
    passed = time.perf_counter() - begun
    found, lines = summary_of(tmp_path), read_log(tmp_path / LOG_FILE)
    require_sums(found)
    assert read_summary(tmp_path).model_dump(mode="json") == found
    assert found["setup_seconds"] >= LOADING
    assert found["setup_seconds"] + found["wall_seconds"] <= passed
    assert (
        found["tokens"]
        == manifest["tokens"]
        == [line for line in lines if "loss" in line][-1]["tokens"]
        > 0
    )
    assert found["tokens_per_second"] == pytest.approx(found["tokens"] / manifest["seconds"])
    assert (
        (found["steps"], found["ended_by"])
        == (manifest["steps"], manifest["ended_by"])
        == (6, "steps")
    )
    for part in ("target", "drafter", "update", "evaluation", "saving"):
        assert found["seconds"][part] > 0, part
    trained = found["wall_seconds"] - found["seconds"]["evaluation"] - found["seconds"]["saving"]
    assert found["mfu"] == pytest.approx(
        found["flops"] / (trained * found["peak"]["tflops"] * 1e12)
    )
    # at the start and at the end
    assert re.search(r"measured: .* highest of ([2-9]|\d\d+) probes$", found["peak"]["source"])
    assert (found["energy_joules"], found["energy_source"]) == (None, "no NVIDIA GPU")
    assert [(each["step"], each["tau"]) for each in found["taus"]] == [
        (line["step"], line["tau"]) for line in lines if "tau" in line
    ]
    assert found["best"] == manifest["best"]
    shown = capsys.readouterr().err
    assert f"{found['device_hours']:.4g} (1 x {found['device']['name']})" in shown
    assert re.search(r"energy +n/a \(no NVIDIA GPU\)", shown)
    assert f"{found['setup_seconds']:,.1f} s before the first step" in shown
    # no terminal: plain lines
    assert re.search(r"^step 1/6: loss .* tokens/s .* memory", shown, re.MULTILINE)


def test_the_plot_is_a_picture_and_is_there_only_where_tau_was_measured(
    micro: Path, tmp_path: Path
) -> None:
    train(out=tmp_path / "measured", **settings(micro, max_steps=2, eval_every=1, parity=False))
    plot = tmp_path / "measured" / PLOT_FILE
    assert plot.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    height, width, _ = matplotlib.image.imread(plot).shape
    assert height > 100 and width > 200
    assert len(summary_of(tmp_path / "measured")["taus"]) == 2
    train(out=tmp_path / "unmeasured", **settings(micro, max_steps=2, eval_every=0, parity=False))
    found = summary_of(tmp_path / "unmeasured")
    require_sums(found)
    assert (found["taus"], found["best"]) == ([], None)
    assert not (tmp_path / "unmeasured" / PLOT_FILE).exists()


def test_a_stopped_run_leaves_its_summary_and_sessions_add_up(
    micro: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = settings(micro, eval_every=2, save_every=0)
    plain = Trainer.step

    def step(self: Trainer, index: int, *rest: Any) -> bool:
        if index == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return plain(self, index, *rest)

    monkeypatch.setattr(Trainer, "step", step)
    with pytest.raises(Stopped):
        train(out=tmp_path, **arguments)
    monkeypatch.setattr(Trainer, "step", plain)
    first, shown = summary_of(tmp_path), capsys.readouterr().err
    require_sums(first)
    assert (first["ended_by"], first["steps"], len(first["taus"])) == ("SIGTERM", 3, 1)
    # what may be lost comes first
    assert shown.index("state of step 3 saved") < shown.index("device-hours")
    assert (tmp_path / PLOT_FILE).is_file()
    snapshot = StateStore(tmp_path / setup.CHECKPOINTS, 2, join_world("cpu")).newest()
    assert snapshot is not None
    kept = snapshot.record["spent"]  # what is known of the first session from here on
    assert LOADING <= kept["setup"] == first["setup_seconds"]

    manifest = train(out=tmp_path, **arguments)
    whole = summary_of(tmp_path)
    require_sums(whole)
    assert (whole["ended_by"], whole["steps"]) == ("steps", 6)
    tokens = {
        line["step"]: line["tokens"] for line in read_log(tmp_path / LOG_FILE) if "loss" in line
    }
    assert (first["tokens"], whole["tokens"], manifest["tokens"]) == (
        tokens[3],
        tokens[6],
        tokens[6],
    )
    assert whole["setup_seconds"] >= kept["setup"] + LOADING
    for part in PARTS:
        assert whole["seconds"][part] >= kept.get(part, 0.0)
    assert whole["seconds"]["drafter"] > kept["drafter"]
    # three steps each; rows differ in supervised tokens
    assert whole["flops"] == pytest.approx(2 * kept["flops"], rel=0.3)
    assert [each["step"] for each in whole["taus"]] == [2, 4, 6]
