"""Three trainings of a policy, which are one training as far as the policy sees it."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from heads.api.checkpoint import save_drafter
from heads.api.errors import UserError
from inference.decoding.config import DecodeConfig
from inference.decoding.engine import Engine
from inference.measure.prompts import Prompt
from inference.target.loading import TargetConfig
from inference.target.model import TargetModel
from scripts.evidence import rl
from scripts.evidence.grpo import Policy, advantages, python_reward
from scripts.tools.common import cpu_target
from tests.heads.recipes import build
from tests.inference.tokenizers import save_micro_target
from train.optim import OptimConfig
from train.policy.follower import Follower
from train.policy.training import RefreshSettings

TEXTS = ("Why?", "a b c", "Tell me.")
ASKED = [
    Prompt(f"p{i}", "code", messages=({"role": "user", "content": text},))
    for i, text in enumerate(TEXTS)
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A micro target, rewarded for long answers: random text is no Python."""
    monkeypatch.setattr(rl, "python_reward", lambda text: float(len(text)))
    return save_micro_target(tmp_path / "policy")


def make_ways(folder: Path) -> list[rl.Way]:
    ways = []
    for name in rl.WAYS:
        target = TargetModel.load(TargetConfig(str(folder), dtype="float64", device="cpu"))
        drafter = (
            None
            if name == rl.NONE
            else build("distilled", target, changes={"from_target_layers": (0,)})
        )
        decode = DecodeConfig(depth=3, temperature=1.0, batch_size=4, max_new_tokens=12)
        settings = RefreshSettings(OptimConfig(kind="muon", lr=0.01))
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        policy = Policy(model, torch.optim.AdamW(model.parameters(), lr=3e-3))
        refresh = 2 if name == rl.FOLLOWING else 0
        ways.append(
            rl.Way(name, policy, Follower(Engine(target, drafter, decode), settings), refresh)
        )
    return ways


def step(ways: list[rl.Way], number: int) -> dict[str, Any]:
    seeds = range(100 * number, 100 * number + 12)
    return {way.name: way.step(ASKED, 4, seeds) for way in ways}


def test_three_ways_see_one_trajectory_and_the_drafter_learns(folder: Path) -> None:
    ways = make_ways(folder)
    before = {name: value.clone() for name, value in ways[0].policy.model.state_dict().items()}
    steps = [step(ways, number) for number in range(6)]
    for found in steps:
        assert len({part["answers"] for part in found.values()}) == 1
    assert len({found[rl.NONE]["answers"] for found in steps}) == 6
    states = [way.policy.model.state_dict() for way in ways]
    assert any(not torch.equal(value, before[name]) for name, value in states[0].items())
    for name, value in states[0].items():
        assert all(torch.equal(state[name], value) for state in states[1:]), name
    assert steps[0][rl.NONE]["tau"] == 1.0
    later = {name: sum(found[name]["tau"] for found in steps[3:]) for name in rl.WAYS}
    assert later[rl.FOLLOWING] > later[rl.FROZEN]


def test_a_state_goes_on_as_if_nothing_had_happened(folder: Path, tmp_path: Path) -> None:
    whole, settings = make_ways(folder), {"seed": "0"}
    steps = [step(whole, 0)]
    rl.save(tmp_path / "state", settings, whole, steps)
    steps.append(step(whole, 1))
    fresh = make_ways(folder)
    assert rl.restore(tmp_path / "state", settings, fresh) == steps[:1]
    again = step(fresh, 1)
    for name in rl.WAYS:
        for key in ("answers", "tau", "reward", "refresh_loss"):
            assert again[name][key] == steps[1][name][key], (name, key)
    with pytest.raises(UserError, match="other values of seed"):
        rl.restore(tmp_path / "state", {"seed": "1"}, fresh)
    (tmp_path / "state" / "state.pt").write_bytes(b"cut off")
    with pytest.raises(UserError, match="cannot be read"):
        rl.restore(tmp_path / "state", settings, fresh)
    assert rl.restore(tmp_path / "elsewhere", settings, fresh) == []


def test_the_report_says_where_ways_differ(folder: Path, tmp_path: Path) -> None:
    steps = [step(make_ways(folder), 0)] * 3
    steps[2] = {**steps[2], rl.FROZEN: {**steps[2][rl.FROZEN], "answers": "others"}}
    given = argparse.Namespace(**dict.fromkeys(rl.SETTINGS, 1))
    given.command, given.steps, given.out = "rl", 3, tmp_path / "rl"
    rl.write(given, steps)
    content = json.loads((tmp_path / "rl.json").read_text())
    frozen = content["ways"][rl.FROZEN]
    assert (frozen["same_answers"], frozen["first_difference"]) == (2, 3)
    page = (tmp_path / "rl.md").read_text()
    assert "| 2/3 |" in page and page.count("| 3/3 |") == 2


@pytest.mark.slow
def test_the_command_trains_the_embedded_target_part_by_part(tmp_path: Path) -> None:
    target = cpu_target()
    save_drafter(
        build("eagle3", target, shaken=0.0, changes={"draft_vocab_size": 0}),
        tmp_path / "head",
        target.info,
    )
    given = ["--drafter", str(tmp_path / "head"), "--prompts", "1", "--group", "2", "--tokens", "8"]
    given += ["--state", str(tmp_path / "state"), "--out", str(tmp_path / "rl"), "--save", "1"]
    for steps in (1, 2):
        assert rl.main([*given, "--steps", str(steps)]) == 0
        content = json.loads((tmp_path / "rl.json").read_text())
        assert content["steps"] == steps
        assert all(way["same_answers"] == steps for way in content["ways"].values())
    assert rl.main([*given, "--steps", "2", "--seed", "1"]) == 2


def test_rewards_of_python() -> None:
    assert python_reward("```python\ndef f():\n    return 1\n```\nDone.") == 1.0
    assert python_reward("def f():\n    return 1") == 1.0
    assert python_reward("```\nx = 1\ny = (\n```") == 0.25
    assert python_reward("x = 1\ny = 2\nthis is no code\nz") == 0.25
    assert (
        python_reward("This is no code.") == python_reward("") == python_reward("```\n```") == 0.0
    )


def test_advantages_are_within_groups() -> None:
    found = advantages([1.0, 0.0, 5.0, 5.0], 2)
    assert found.tolist() == pytest.approx([1.0, -1.0, 0.0, 0.0], abs=1e-3)
