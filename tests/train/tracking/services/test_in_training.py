"""What a real training hands to the services."""

from __future__ import annotations

from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.train.micro_run import settings
from train.run import train
from train.tracking.tracker import TENSORBOARD, TrackerConfig


def test_answers_of_the_best_measurement_are_shown(micro: Path, tmp_path: Path) -> None:
    tracker = TrackerConfig(wandb="disabled", tensorboard=True, transcripts=2)
    manifest = train(out=tmp_path, **settings(micro, tracker=tracker))
    read = EventAccumulator(str(tmp_path / TENSORBOARD), size_guidance={"tensors": 0})
    read.Reload()
    last = read.Tensors("transcripts")[-1]
    assert last.step == manifest["best"]["step"]
    rows = last.tensor_proto.string_val[0].decode().splitlines()[2:]
    assert len(rows) == 2
    prompt, answer, tokens, tau = rows[0].strip("| ").split(" | ")
    assert prompt and answer and int(tokens) == 12 and float(tau) >= 1.0


@pytest.mark.parametrize("eval_every", [3, 0])
def test_the_checkpoint_that_is_kept_is_the_whole_one(
    micro: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, eval_every: int
) -> None:
    """Also of a training that measures nothing, whose last weights count as the best."""
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "staging"))
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
    tracker, out = TrackerConfig(wandb="offline", artifact=True), tmp_path / "out"
    train(out=out, **settings(micro, tracker=tracker, eval_every=eval_every))
    files = [path for path in tmp_path.rglob("*") if path.is_file() and out not in path.parents]
    copies = [path.read_bytes() for path in files]
    for name in ("config.json", "model.safetensors"):
        assert (out / "best" / name).read_bytes() in copies, name
