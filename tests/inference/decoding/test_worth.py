"""decode.compile=auto stands for true only where a step can be compiled and is run often enough."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from inference.decoding.config import DecodeConfig
from inference.decoding.execution import worth
from inference.decoding.execution.worth import LEAST_STEPS, settled
from inference.target.model import TargetModel
from tests.models import random_target

AUTO = DecodeConfig(depth=2)


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return random_target(dtype=torch.float32)


@pytest.fixture(autouse=True)
def a_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    found = tmp_path / "g++"
    found.write_text("")
    found.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    return found


def test_many_steps_are_compiled_and_few_are_not(target: TargetModel) -> None:
    assert AUTO.compile == "auto" and not AUTO.compiles
    assert settled(AUTO, target, LEAST_STEPS).compiles
    assert settled(AUTO, target, LEAST_STEPS - 1).compile is False


@pytest.mark.parametrize("given", [True, False])
def test_what_is_asked_for_is_done(target: TargetModel, given: bool) -> None:
    for steps in (1, 10 * LEAST_STEPS):
        assert settled(replace(AUTO, compile=given), target, steps).compile is given


@pytest.mark.parametrize(
    "changes", [{"exact": True}, {"ahead": True}, {"adaptive": "entropy"}], ids=str
)
def test_what_cannot_be_compiled_is_not(target: TargetModel, changes: dict[str, Any]) -> None:
    assert not settled(replace(AUTO, **changes), target, LEAST_STEPS).compiles


def test_other_types_packed_and_large_weights_are_not(
    target: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not settled(AUTO, random_target(dtype=torch.bfloat16), LEAST_STEPS).compiles

    class Packed(nn.Parameter):
        pass

    packed = random_target(dtype=torch.float32)
    packed.model.lm_head.weight = Packed(torch.zeros(4, 4), requires_grad=False)
    assert not settled(AUTO, packed, LEAST_STEPS).compiles
    monkeypatch.setattr(worth, "MOST_WEIGHTS", 1000)
    assert not settled(AUTO, target, LEAST_STEPS).compiles


def test_nothing_is_compiled_without_a_compiler(target: TargetModel, a_compiler: Path) -> None:
    a_compiler.unlink()
    assert not settled(AUTO, target, LEAST_STEPS).compiles
