"""The comparison with speculators: both sides read the same, our side trains as `headstart train`
does, what is converted is the same drafter. The library itself is not needed here.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from heads.api.errors import UserError
from heads.api.features import FeatureSpec
from inference.target.loading import TargetConfig
from inference.target.model import TargetModel
from scripts.evidence import sides, speculators
from scripts.evidence.foreign import speculators_worker
from scripts.evidence.sides import Setting, Side
from scripts.evidence.speculators import timing
from tests.train.micro_run import prepare
from train.data.pack import PackedData


@pytest.fixture(scope="module")
def micro(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(tmp_path_factory.mktemp("micro"))


@pytest.fixture(scope="module")
def target(micro: Path) -> TargetModel:
    return TargetModel.load(TargetConfig(str(micro / "target"), dtype="float32", device="cpu"))


def test_rows_are_the_documents_of_our_training(
    micro: Path, tmp_path: Path, target: TargetModel
) -> None:
    setting = Setting("python", micro / "answers", micro / "target", tmp_path, 1)
    tokens = setting.write_rows()
    lines = (tmp_path / "rows.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    data = PackedData.from_manifest(micro / "answers", target.info, sides.LENGTH)
    assert tokens == data.report.tokens == sum(len(row["tokens"]) for row in rows)
    assert sum(sum(row["mask"]) for row in rows) == int(data.supervised.sum())
    assert all(len(row["mask"]) == len(row["tokens"]) for row in rows)


def test_their_features_are_our_taps(micro: Path, target: TargetModel) -> None:
    model = AutoModelForCausalLM.from_pretrained(micro / "target", dtype=torch.float32).eval()
    batch = [[11, 12, 13, 14, 15, 16], [20, 21, 22]]
    layers = list(range(1, target.info.num_layers))[:3]
    found = speculators_worker.hidden_states(model, batch, layers)
    for row, states in zip(batch, found, strict=True):
        tokens = torch.tensor([row])
        needs = FeatureSpec(tuple(layers), last_hidden=True)
        with torch.autocast("cpu", torch.bfloat16):
            taps, last = target.features(
                tokens,
                torch.arange(len(row))[None],
                torch.ones_like(tokens, dtype=torch.int32),
                needs,
            )
        assert taps is not None
        assert last is not None
        torch.testing.assert_close(states[:, :-1].float(), taps[0].float(), atol=0.05, rtol=0.05)
        with torch.no_grad():
            torch.testing.assert_close(
                model.model.norm(states[:, -1].float()), last[0].float(), atol=0.05, rtol=0.05
            )


class Commands:
    """A channel that gives commands from a list and keeps the answers."""

    def __init__(self, *commands: dict[str, Any]) -> None:
        self.given, self.answers = commands, []

    def commands(self):
        return iter(self.given)

    def say(self, **answer: Any) -> None:
        self.answers.append(answer)


def test_our_side_takes_the_steps_of_headstart_train(
    micro: Path, tmp_path: Path, target: TargetModel
) -> None:
    from scripts.config.schema import load_settings
    from scripts.config.stages import STAGES
    from train.run import train

    overrides = [
        "head=medusa",
        "head.num_heads=2",
        "engine=torch",
        "target=local",
        f"target.path={micro / 'target'}",
        "target.dtype=float32",
        "target.device=cpu",
        "train.max_steps=3",
        "train.global_batch=2",
        "train.micro_batch=2",
        "train.sequence_length=64",
        "train.eval_every=0",
        "train.parity=false",
        "train.save_every=0",
        "train.tracker.wandb=disabled",
    ]
    job = {"overrides": overrides, "answers": str(micro / "answers"), "out": str(tmp_path / "a")}
    channel = Commands(
        {"do": "steps", "count": 1},
        {"do": "steps", "count": 2},
        {"do": "save", "to": str(tmp_path / "saved")},
    )
    speculators.follow_commands(job, channel)
    assert channel.answers[0]["ready"]
    assert [sorted(answer) for answer in channel.answers[1:]] == [
        ["peak_bytes", "seconds", "tokens"]
    ] * 2 + [["saved"]]
    s = load_settings(STAGES["train"], overrides)
    train(
        s.head.kind,
        s.head.config,
        target=s.target,
        data=micro / "answers",
        out=tmp_path / "b",
        config=s.train,
        features=s.features,
        engine=s.engine,
        optim=s.optim,
        schedule=s.schedule,
        decode=s.decode,
        joint=s.joint,
    )
    mine, theirs = (
        load_file(folder / "model.safetensors")
        for folder in (tmp_path / "saved", tmp_path / "b" / "best")
    )
    assert set(mine) == set(theirs)
    for name in mine:
        assert torch.equal(mine[name], theirs[name]), name


def test_a_side_that_dies_is_named_with_its_log(tmp_path: Path) -> None:
    side = Side(
        [sys.executable, "-c", "import sys; sys.exit('no such thing')"], tmp_path / "log.txt"
    )
    with pytest.raises(UserError, match="no such thing"):
        side.answer()


class Clock:
    """A side that answers as it is told, and notes what it was asked."""

    def __init__(self, seconds: float, tokens: int, peak: int) -> None:
        self.seconds, self.tokens, self.peak, self.counts = seconds, tokens, peak, []

    def answer(self) -> dict[str, Any]:
        return {"ready": True, "trained_weights": 5}

    def ask(self, **command: Any) -> dict[str, Any]:
        self.counts.append(command["count"])
        return {
            "seconds": self.seconds * len(self.counts),
            "tokens": self.tokens,
            "peak_bytes": self.peak,
        }

    def end(self) -> None:
        self.counts.append(0)


def test_speeds_are_ratios_of_sums_after_the_warm_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, single = Clock(1.0, 800, 300), Clock(1.5, 800, 150)
    long, short = Clock(8.0, 800, 600), Clock(2.0, 400, 200)
    monkeypatch.setattr(
        speculators,
        "our_side",
        lambda setting, kind, name, steps, at_once=8: ours if at_once == 8 else single,
    )
    monkeypatch.setattr(
        Setting,
        "theirs",
        lambda self, kind, name, places, flags, epochs: long if places == 4096 else short,
    )
    monkeypatch.setattr(Setting, "making", lambda self, kind: {"tokens": 1000, "seconds": 10.0})
    setting = Setting("python", tmp_path, tmp_path, tmp_path, 1)
    found = timing(setting, "eagle3", warm=1, rounds=2, shorter=(512,))
    assert (long.counts, short.counts) == ([2, 2, 2, 0], [16, 16, 16, 0])
    rows = found["sides"]
    assert rows["speculators, rows of 4096"]["tokens_per_second"] == pytest.approx(1600 / (16 + 24))
    assert found["their_fastest"] == "speculators, rows of 512"
    assert found["speed_ratio_at_equal_steps"] == pytest.approx(8.0)
    theirs = 800 / (4 + 6)
    assert found["speed_ratio"] == pytest.approx(rows["ours"]["tokens_per_second"] / theirs)
    assert found["speed_ratio_with_their_features"] == pytest.approx(
        rows["ours"]["tokens_per_second"] / (1 / (1 / theirs + 10.0 / 1000))
    )
    assert found["memory_ratio"] == pytest.approx({"4096": 0.5, "512": 0.75})
