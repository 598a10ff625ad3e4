"""TensorBoard's event file, as TensorBoard reads it."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

from heads.api.errors import UserError
from tests.train.tracking.services.a_run import track
from train.tracking.tracker import TENSORBOARD, Tracker, TrackerConfig

ON = TrackerConfig(wandb="disabled", tensorboard=True)


def events(out: Path) -> list[tuple[int, dict[str, float]]]:
    """Step and values of every summary in the only event file."""
    (path,) = (out / TENSORBOARD).iterdir()
    return [
        (event.step, {each.tag: each.simple_value for each in event.summary.value})
        for event in LegacyEventFileLoader(str(path)).Load()
        if event.HasField("summary")
    ]


def test_it_shows_every_step_once_also_after_a_kill(tmp_path: Path) -> None:
    with Tracker(ON, tmp_path, length=0, settings={}) as log:
        log.write(1, {"loss": 1.5, "cost": {"target": 0.25, "mfu": 0.5}, "name": "x"})
        length = log.flush()
        log.write(300, {"loss": 3.0})  # after the state
    assert [step for step, _ in events(tmp_path)] == [1, 300]
    with Tracker(ON, tmp_path, length=length, settings={}) as log:
        log.write(300, {"loss": 4.0, "gap": math.nan, "sure": True})
    assert events(tmp_path) == [
        (1, {"loss": 1.5, "cost/target": 0.25, "cost/mfu": 0.5}),
        (300, {"loss": 4.0, "sure": 1.0}),
    ]


def test_transcripts_are_a_table_of_text(tmp_path: Path) -> None:
    track(tmp_path, tensorboard=True)
    read = EventAccumulator(str(tmp_path / TENSORBOARD), size_guidance={"tensors": 0})
    read.Reload()
    assert "transcripts" in read.PluginTagToContent("text")
    (found,) = read.Tensors("transcripts")
    assert found.step == 2
    text = found.tensor_proto.string_val[0].decode()
    assert text.splitlines()[0] == "| prompt | answer | tokens | tau |"
    assert text.splitlines()[2] == "| What is a list? | A row \\| of<br>things. | 7 | 2.5 |"


def test_without_tensorboard_the_error_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto", None)
    with pytest.raises(UserError, match=r"\.\[tracking\]"):
        Tracker(ON, tmp_path, length=0, settings={})
