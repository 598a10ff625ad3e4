"""Target processes within a launch: one or two of them feed trainers, through the hosts' memory or
from device to device (here over gloo too); the training is that of the trainers alone."""

from __future__ import annotations

import json
import re
import signal
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from heads.api.errors import UserError
from inference.manifest import read_manifest
from tests.train import launch
from tests.train.micro_run import settings
from train.distributed import World
from train.features.config import FeaturesConfig
from train.features.group import Division, GroupSource, Link, answer_parts, cut, divide
from train.features.store.batches import Form
from train.tracking.summary import SUMMARY_FILE
from train.tracking.tracker import LOG_FILE, read_log

WORKER = "tests.train.micro_run"
EAGLE3 = ['kind="eagle3"', 'head={"taps": [0, 1, 2], "ttt_steps": 2}']


def group(targets: int, **more: Any) -> str:
    return "features=" + json.dumps({"mode": "group", "targets": targets, "format": "fp32", **more})


def figures(out: Path) -> list[tuple[float, float]]:
    return [
        (line["loss"], line["grad_norm"]) for line in read_log(out / LOG_FILE) if "loss" in line
    ]


@pytest.mark.parametrize(
    ("trainers", "targets", "transport"),
    [
        pytest.param(1, 1, "auto", marks=pytest.mark.slow),
        pytest.param(2, 1, "host", marks=pytest.mark.slow),
        pytest.param(2, 1, "device", marks=pytest.mark.slow),
        (2, 2, "device"),
    ],
)
def test_trainers_fed_by_target_processes_train_as_without_them(
    micro: Path, tmp_path: Path, trainers: int, targets: int, transport: str
) -> None:
    launch.run(trainers, WORKER, micro, tmp_path / "online", *EAGLE3)
    output = launch.run(
        trainers + targets,
        WORKER,
        micro,
        tmp_path / "group",
        *EAGLE3,
        group(targets, transport=transport),
        "energy=true",
    )
    assert figures(tmp_path / "online") == figures(tmp_path / "group"), output[-2000:]
    best = [
        (tmp_path / name / "best" / "model.safetensors").read_bytes()
        for name in ("online", "group")
    ]
    assert best[0] == best[1]
    assert read_manifest(tmp_path / "group", "train")["processes"] == trainers
    require_cost(json.loads((tmp_path / "group" / SUMMARY_FILE).read_text()), trainers, targets)
    assert re.search(rf"\({trainers + targets} x .*, of which {targets} runs? the target\)", output)


def require_cost(summary: dict[str, Any], trainers: int, targets: int) -> None:
    """The hours are those of all processes; the energy is what the trainers' GPUs used, each of
    them asked for its own."""
    assert (summary["device"]["processes"], summary["device"]["trainers"]) == (
        trainers + targets,
        trainers,
    )
    seconds = summary["setup_seconds"] + summary["wall_seconds"]
    assert summary["device_hours"] == pytest.approx(seconds * (trainers + targets) / 3600)
    readings, rest = divmod(summary["energy_joules"], sum(100**rank for rank in range(trainers)))
    assert rest == 0 and readings >= summary["steps"]
    assert summary["energy_source"].startswith(f"NVML, the GPUs of {trainers} training process")


def test_answers_between_devices_are_received_in_the_order_of_their_requests() -> None:
    """Whatever order they are asked for in; a drafter's own text is requested behind the batches
    ahead, and needed before them."""
    received = []

    def arriving(number: int) -> Any:
        one = SimpleNamespace(answer=None)
        one.take = lambda timeout: received.append(number) or number
        return one

    source: Any = object.__new__(GroupSource)
    source.link, source.timeout = SimpleNamespace(device=object()), timedelta(seconds=1)
    coming = [arriving(number) for number in range(3)]
    source._coming = list(coming)
    assert [source._take(coming[number]) for number in (2, 0, 1)] == [2, 0, 1]
    assert received == [0, 1, 2] and not source._coming


@pytest.mark.parametrize(
    ("rank", "expected"), [(0, ["from 3"]), (1, ["from 4"]), (3, ["to 0", "to 2"]), (4, ["to 1"])]
)
def test_devices_are_connected_before_the_first_answer(
    rank: int, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pair of GPUs that connects later can wait for an answer to another trainer."""
    found = []
    for name, word in (("send", "to"), ("recv", "from")):
        monkeypatch.setattr(
            dist, name, lambda byte, other, group, word=word: found.append(f"{word} {other}")
        )
    monkeypatch.setattr(dist, "new_group", lambda *_, **__: object())
    Link.open("device", World(rank, 5), Division(5, 2))
    assert found == expected


def test_a_signal_ends_trainers_and_targets_in_order_and_the_run_continues(
    micro: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    launch.run(2, WORKER, micro, tmp_path / "whole", *EAGLE3, group(1))
    process = launch.start(2, WORKER, micro, out, *EAGLE3, group(1, transport="device"), "slow=0.3")
    end = time.monotonic() + 300
    while not (out / LOG_FILE).is_file() or len(read_log(out / LOG_FILE)) < 2:
        assert process.poll() is None, process.communicate()[0][-3000:]
        assert time.monotonic() < end
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=300)
    assert "saved; the same command continues there" in output, output[-3000:]
    launch.run(2, WORKER, micro, out, *EAGLE3, group(1))
    assert figures(out) == figures(tmp_path / "whole")


def test_roles() -> None:
    division = Division(7, 3)
    assert [division.target_of(trainer) for trainer in range(4)] == [4, 5, 6, 4]
    assert division.trainers_of(4) == [0, 3]
    assert sorted(t for rank in (4, 5, 6) for t in division.trainers_of(rank)) == [0, 1, 2, 3]


def test_senseless_divisions_are_refused(micro: Path) -> None:
    from train.config import TrainingJob

    made = settings(micro)
    made |= {"features": FeaturesConfig(mode="group", targets=2), "out": micro / "x"}
    with pytest.raises(
        UserError,
        match=r"of 2 processes, features\.targets=2 run the target, which leaves 0 to train",
    ):
        divide(TrainingJob(**made), World(0, 2))
    divided = settings(micro, engine={"target_sharding": "zero3"})["engine"]
    with pytest.raises(
        UserError, match=r"engine\.target_sharding=zero3 divides the target among all processes"
    ):
        divide(
            TrainingJob(**{**made, "engine": divided, "features": FeaturesConfig(mode="group")}),
            World(0, 2),
        )
    other = settings(micro, name="deepspeed")
    with pytest.raises(
        UserError, match=r"features\.mode=group needs engine=torch: DeepSpeed takes every process"
    ):
        divide(
            TrainingJob(
                **{**made, "engine": other["engine"], "features": FeaturesConfig(mode="group")}
            ),
            World(0, 2),
        )


@pytest.mark.parametrize("fmt", ["fp32", "bf16", "fp8", "int8", "int4"])
def test_an_answer_is_cut_where_it_was_joined(fmt: str) -> None:
    form = Form(fmt, 40, 100, 3 if fmt == "int8" else 0)
    parts = answer_parts((1, 4), True, form)
    generator = torch.Generator().manual_seed(0)
    size = sum(width for *_, width in parts)
    buffer = torch.randint(0, 255, (size * 7,), generator=generator, dtype=torch.uint8)
    content = cut(buffer, parts, 7)
    assert set(content) == {"tap.1", "tap.4", "top" if form.top_logits else "last_hidden"}
    flat = [
        content[thing][part].contiguous().view(torch.uint8).flatten() for thing, part, *_ in parts
    ]
    assert torch.equal(torch.cat(flat), buffer)
