"""A scheduler's signal while features are awaited: the last whole step is saved, and the training
ends with status 0."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from heads.api.registry import get_kind
from inference.manifest import MANIFEST_FILE
from inference.target.loading import TargetConfig
from inference.target.model import TargetModel
from tests.train import launch
from tests.train.micro_run import leave_waiting, settings
from train.data.loader import PackedBatch
from train.features.config import FeaturesConfig
from train.features.fetch import ThreadedSource
from train.features.make import fetch_from
from train.features.remote import wire
from train.features.remote.server import FeatureServer
from train.features.store.batches import Form
from train.features.store.layout import index_path, read_plan
from train.features.store.writer import StoreJob, write_features
from train.run import train
from train.stopping import Stopped
from train.tracking.tracker import LOG_FILE, read_log

WORKER = "tests.train.micro_run"
EAGLE3 = {
    "kind": "eagle3",
    "head": {"taps": (0, 1, 2), "ttt_steps": 2},
    "eval_every": 0,
    "save_every": 0,
    "max_steps": 14,
}


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def waiting() -> Iterator[None]:
    """This process gets SIGTERM as soon as it says that it waits for features."""
    undo = leave_waiting()
    yield
    undo()


@pytest.fixture
def unfinished(micro: Path, tmp_path: Path) -> Path:
    """A store of which a shard is still to come."""
    folder = tmp_path / "store"
    made = StoreJob(
        heads=(("eagle3", "eagle3", get_kind("eagle3").config_class(taps=(0, 1, 2))),),
        target=TargetConfig(str(micro / "target"), device="cpu"),
        answers=micro / "answers",
        features=FeaturesConfig(format="fp32", shard_mib=0.05, path=str(folder)),
        dtype=torch.float32,
        sequence_length=64,
        batch_rows=2,
        seed=0,
    )
    write_features(made, say=lambda text: None)
    middle = read_plan(folder).shards // 2
    shutil.move(index_path(folder, middle), tmp_path / "index.json")
    (folder / MANIFEST_FILE).unlink()
    return folder


def end_writing(folder: Path) -> None:
    """Let the shard come."""
    shutil.move(folder.parent / "index.json", index_path(folder, read_plan(folder).shards // 2))


def log_of(out: Path) -> list[tuple[int, float, float]]:
    return [
        (line["step"], line["loss"], line["grad_norm"])
        for line in read_log(out / LOG_FILE)
        if "loss" in line
    ]


def stored(folder: Path) -> dict[str, Any]:
    """Features from a store of which every step is asked for when it is due."""
    return {
        "mode": "store",
        "path": str(folder),
        "format": "fp32",
        "ahead": 0,
        "wait_seconds": 600.0,
    }


def test_while_a_row_is_still_being_written(
    micro: Path, tmp_path: Path, unfinished: Path, waiting: None
) -> None:
    train(out=tmp_path / "online", **settings(micro, **EAGLE3))
    arguments = settings(micro, **EAGLE3, features=stored(unfinished))
    with pytest.raises(Stopped) as caught:
        train(out=tmp_path / "stored", **arguments)
    assert caught.value.code == 0
    assert 1 <= caught.value.step < EAGLE3["max_steps"]
    assert (tmp_path / f"stored/checkpoints/step_{caught.value.step:08d}").is_dir()
    end_writing(unfinished)
    train(out=tmp_path / "stored", **arguments)
    assert log_of(tmp_path / "stored") == log_of(tmp_path / "online")


@pytest.mark.slow
def test_two_processes_leave_together_when_one_of_them_waits(
    micro: Path, tmp_path: Path, unfinished: Path
) -> None:
    """Only who waits gets the signal; the other one may be ready to begin the step."""
    changes = {**EAGLE3, "features": stored(unfinished)}
    words = [f"{key}={json.dumps(value)}" for key, value in changes.items()]
    output = launch.run(2, WORKER, micro, tmp_path / "out", *words, "leave_waiting=true")
    assert "saved; the same command continues there" in output, output[-2000:]
    assert not (tmp_path / "out" / MANIFEST_FILE).exists()
    end_writing(unfinished)
    launch.run(2, WORKER, micro, tmp_path / "out", *words)
    assert [step for step, *_ in log_of(tmp_path / "out")] == list(
        range(1, EAGLE3["max_steps"] + 1)
    )


def test_while_a_server_is_asked_again_and_again(
    micro: Path, tmp_path: Path, waiting: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = TargetModel.load(TargetConfig(str(micro / "target"), device="cpu"))
    server = FeatureServer(target, torch.float32, "127.0.0.1", 0, "")
    thread = threading.Thread(target=server.run)
    thread.start()
    plain, calls, before = server.compute, [], set(threading.enumerate())

    def broken(body: bytes, ask: Any) -> bytes:
        calls.append(1)
        if len(calls) > 6:
            raise RuntimeError("out of memory, say")
        return plain(body, ask)

    try:
        monkeypatch.setattr(server, "compute", broken)
        features = {
            "mode": "remote",
            "servers": (server.address,),
            "format": "fp32",
            "ahead": 0,
            "retries": 1000,
        }
        with pytest.raises(Stopped) as caught:
            train(out=tmp_path, **settings(micro, **EAGLE3, features=features))
    finally:
        server.end()
        thread.join()
    assert (caught.value.code, caught.value.step) == (0, 3)
    assert (tmp_path / "checkpoints/step_00000003").is_dir()
    trying = [each for each in set(threading.enumerate()) - before if each.name == "features"]
    for each in trying:
        each.join(60)  # one may be waiting for a slow answer, after which it must not ask again
    assert not [each for each in trying if each.is_alive()]


class OnGpu:
    """A tensor in the memory of a GPU, which cannot be pinned."""

    def cpu(self) -> torch.Tensor:
        return torch.ones(2)

    def pin_memory(self) -> torch.Tensor:
        raise RuntimeError("only dense CPU tensors can be pinned")


def test_features_that_are_put_together_on_a_gpu_are_pinned_on_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those of engines and of kept states are: their final norm runs on the target's device."""
    monkeypatch.setattr(wire, "compute", lambda *_: ({"last": {"values": OnGpu()}}, None))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self + 1)
    fetch = partial(fetch_from, None, torch.float32, None)  # type: ignore[arg-type]
    source = ThreadedSource(fetch, Form("fp32", 2, 5), 1, lambda: None, pinned=True)
    rows = torch.ones(1, 2, dtype=torch.int64)
    found = source.ask(PackedBatch.unsupervised(rows, rows, rows.int())).result()
    source.close()
    assert found["last"]["values"].tolist() == [2, 2]


@pytest.mark.parametrize("pinned", [True, False])
def test_what_was_fetched_is_pinned_by_the_thread_that_fetched_it(
    monkeypatch: pytest.MonkeyPatch, pinned: bool
) -> None:
    """A copy from ordinary memory would hold the trainer up, and so would pinning in its thread."""
    places = []

    def remember(self: torch.Tensor) -> torch.Tensor:
        places.append(threading.current_thread().name)
        return self + 0

    monkeypatch.setattr(torch.Tensor, "pin_memory", remember)
    content = {"tap.1": {"values": torch.ones(2)}, "last": {"values": torch.ones(3)}}
    form = Form("fp32", 2, 5)
    source = ThreadedSource(lambda packed: content, form, 1, lambda: None, pinned)
    rows = torch.ones(1, 2, dtype=torch.int64)
    found = source.ask(PackedBatch.unsupervised(rows, rows, rows.int())).result()
    source.close()
    assert found.keys() == content.keys()
    assert torch.equal(found["last"]["values"], torch.ones(3))
    assert places == (["features"] * 2 if pinned else [])
