"""The running mean of weights: its values, that a continuation keeps it, and that it is what is
measured and kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from heads.api.errors import UserError
from tests.train import launch
from tests.train.micro_run import settings
from tests.train.test_resume import STEPS, WORKER, Killed, cut_short, pairs, same_outcome
from tests.train.toy import OPTIM, Toy, train_steps
from train.averaging import WeightAverage
from train.distributed import World
from train.engines.base import EngineConfig
from train.engines.torch_engine import TorchEngine
from train.loop import Trainer
from train.run import train

EVERY, DECAY = 3, 0.9


def test_the_mean_is_the_weighted_sum_of_the_weights_that_entered_it() -> None:
    engine = TorchEngine(Toy(), EngineConfig(name="torch", precision="float32"), OPTIM, World())
    average, taken = WeightAverage(DECAY, EVERY), []
    assert torch.equal(average.weights(engine)["scale"], engine.weights()["scale"])
    for step in range(24):
        train_steps(engine, World(), 4, step, step + 1)
        average.follow(step + 1, engine)
        if (step + 1) % EVERY == 0:
            taken.append(engine.weights())
    shares = [max(1 - DECAY**EVERY, 1 / n) for n in range(1, len(taken) + 1)]
    found = average.weights(engine)
    for name, newest in taken[-1].items():
        parts = []
        for place, one in enumerate(taken):
            later = torch.tensor([1 - share for share in shares[place + 1 :]]).prod()
            parts.append(shares[place] * later * one[name].double())
        expected = torch.stack(parts).sum(0)
        torch.testing.assert_close(found[name].double(), expected, rtol=1e-5, atol=1e-6)
        assert found[name].dtype == newest.dtype
    assert not torch.equal(found["out.weight"], engine.weights()["out.weight"])
    assert torch.equal(found["ids"], taken[-1]["ids"])


@pytest.mark.parametrize("stop_at", [2, 8])
def test_half_and_half_is_the_whole(
    micro: Path, tmp_path: Path, stop_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {"average": DECAY, "average_every": 2}
    arguments = settings(micro, max_steps=STEPS, save_every=3, eval_every=5, **given)
    train(out=tmp_path / "whole", **arguments)
    cut_short(monkeypatch, stop_at)
    with pytest.raises(Killed):
        train(out=tmp_path / "parts", **arguments)
    monkeypatch.undo()
    train(out=tmp_path / "parts", **arguments)
    same_outcome(tmp_path / "whole", tmp_path / "parts")
    assert (
        tmp_path / "whole" / "checkpoints" / f"step_{STEPS:08d}" / "average.safetensors"
    ).is_file()


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_divided_weights_have_the_same_mean(micro: Path, tmp_path: Path, stage: int) -> None:
    """Two processes, between which states or weights are divided; a second launch goes on."""
    given = {"name": "deepspeed", "zero_stage": stage, "average": DECAY, "average_every": 2}
    given |= {"save_every": 2, "eval_every": 4, "keep": 5}
    for steps in (4, 8):
        launch.run(2, WORKER, micro, tmp_path, *pairs(**given, max_steps=steps))
        (tmp_path / "manifest.json").unlink()
    states = sorted((tmp_path / "checkpoints").iterdir())
    assert [state.name for state in states] == [f"step_{n:08d}" for n in (2, 4, 6, 8)]
    mean: dict[str, Tensor] = {}
    for number, state in enumerate(states, 1):
        share = max(1 - DECAY**2, 1 / number)
        for name, value in load_file(state / "model.safetensors").items():
            mean[name] = value if number == 1 else (1 - share) * mean[name] + share * value
    for name, value in load_file(states[-1] / "average.safetensors").items():
        torch.testing.assert_close(value, mean[name])


@pytest.mark.parametrize("eval_every", [0, STEPS])
def test_the_mean_is_measured_and_kept(
    micro: Path, tmp_path: Path, eval_every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, Tensor]] = []
    plain = Trainer.evaluate_unless_stopped

    def evaluate(self: Trainer, weights: dict[str, Tensor]) -> Any:
        seen.append(weights)
        return plain(self, weights)

    monkeypatch.setattr(Trainer, "evaluate_unless_stopped", evaluate)
    train(
        out=tmp_path,
        **settings(micro, max_steps=STEPS, eval_every=eval_every, average=DECAY, average_every=2),
    )
    state = tmp_path / "checkpoints" / f"step_{STEPS:08d}"
    mean, last = load_file(state / "average.safetensors"), load_file(state / "model.safetensors")
    kept = load_file(tmp_path / "best" / "model.safetensors")
    assert len(seen) == (1 if eval_every else 0)
    moved = 0
    for name, value in kept.items():
        assert torch.equal(value, mean[name])
        moved += not torch.equal(value, last[name])
        assert all(torch.equal(weights[name], value) for weights in seen)
    assert moved


def test_joint_training_has_no_mean(micro: Path, tmp_path: Path) -> None:
    joint = {"mode": "lora"}
    with pytest.raises(UserError, match=r"train\.average keeps"):
        train(out=tmp_path, **settings(micro, average=DECAY, joint=joint))
