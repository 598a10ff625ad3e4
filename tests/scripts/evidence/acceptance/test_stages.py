"""The parts of the acceptance runs at toy size: they pass as things are, and each fails under a
fault that it is there to find."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from heads.api.batch import LossOutput
from heads.api.drafter import Proposal
from heads.api.errors import UserError
from heads.dflash import Drafter as BlockDrafter
from heads.kernels.reference.row_losses import ROW_LOSSES
from inference.decoding.clock import StepClock
from inference.decoding.config import DecodeConfig
from inference.decoding.execution.graphs import StepRunner
from inference.decoding.requests import Request
from inference.decoding.rules import match
from inference.kernels.reference.attention import TREE_ATTENTION
from inference.kernels.reference.row_linear import InTiles
from inference.target.kv_cache import KVCache
from inference.target.model import TargetModel
from scripts.evidence import gpu
from scripts.evidence.acceptance import correctness, shapes
from scripts.evidence.acceptance.parts import Setting, run_part
from tests.inference.kernels.planted import (
    blind_to_branches,
    half_the_gradient,
    one_piece_lost,
    one_tile_lost,
    run_in_its_place,
    wrong_scale,
)
from train.engines.torch_engine import TorchEngine

PARTS = {part.name: part for parts in gpu.STAGES.values() for part in parts}


def result(name: str, **changes: Any) -> dict[str, Any]:
    """What a part leaves at toy size in float32."""
    sizes = replace(shapes.TINY, texts=1, **changes)
    return run_part(PARTS[name], Setting(torch.device("cpu"), torch.float32, sizes))


@pytest.fixture(autouse=True)
def no_timing_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine does not fail a test; a clock that books nothing still does."""
    monkeypatch.setitem(correctness.CLOCKS_APART, "cpu", 0.9)


@pytest.mark.parametrize(
    "name", ["environment", "attention", "verification", "losses", "gradients"]
)
def test_a_part_passes_as_things_are(name: str) -> None:
    found = result(name)
    assert (found["result"], found["failures"]) == ("passed", [])


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in PARTS if name != "tests"])
def test_every_part_passes_as_things_are(name: str) -> None:
    found = result(name)
    assert (found["result"], found["failures"]) == ("passed", [])
    assert found["facts"]


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("attention", one_piece_lost),
        ("attention", wrong_scale),
        ("attention", blind_to_branches),
        ("verification", one_piece_lost),
        ("verification", wrong_scale),
        ("verification", blind_to_branches),
    ],
)
def test_a_wrong_kernel_fails(
    name: str, fault: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_in_its_place(monkeypatch, fault)
    assert result(name)["result"] == "failed"


@pytest.mark.parametrize("fault", [one_tile_lost, half_the_gradient])
def test_a_wrong_kernel_of_losses_fails(
    fault: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_in_its_place(monkeypatch, fault, ROW_LOSSES)
    found = result("losses")
    assert found["result"] == "failed"
    wrong = {line.split(" in ")[0] for line in found["failures"]}
    assert wrong == ({"gradients"} if fault is half_the_gradient else {"values", "gradients"})


def test_a_right_kernel_passes_in_their_place(monkeypatch: pytest.MonkeyPatch) -> None:
    run_in_its_place(monkeypatch, TREE_ATTENTION.reference)
    assert result("verification")["result"] == "passed"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["clocks", "qwen"])
def test_a_clock_that_books_nothing_fails(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepClock, "mark", lambda self, phase: None)
    assert result(name)["result"] in ("failed", "error")


@pytest.mark.slow
def test_branches_that_are_not_rolled_back_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TargetModel, "_check_against", lambda *given: None)
    monkeypatch.setattr(KVCache, "compact", lambda *given: None)
    found = result("texts")
    assert found["result"] == "failed"
    assert any("mismatches, tree" in line for line in found["failures"])
    assert not any("mismatches, chain" in line for line in found["failures"])


@pytest.mark.slow
def test_drafts_that_are_accepted_unread_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule takes every draft for the target's own pick."""
    follow = match.follow

    def credulous(picks: Tensor, proposal: Proposal) -> Any:
        drafted = torch.cat([proposal.tokens[:, 1:], picks[:, -1:]], 1)
        return follow(drafted, proposal)

    monkeypatch.setattr(match, "follow", credulous)
    assert result("padded")["result"] == "failed"


@pytest.mark.slow
def test_sums_that_depend_on_the_width_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products round otherwise for every number of rows, as a library's may."""
    monkeypatch.setattr(
        InTiles, "__call__", lambda self, rows: (1 + len(rows) / 40) * self.call(rows)
    )
    found = result("exact")
    assert found["result"] == "failed"
    assert any("chain of 5" in line for line in found["failures"])


@pytest.mark.slow
def test_a_replay_of_another_step_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that "auto" runs otherwise than "off" does: from its tenth on it repeats the last
    result."""
    step = StepRunner.step

    def stale(self: StepRunner, *given: Any, **more: Any) -> Any:
        pending, state = step(self, *given, **more)
        if self.captures and self.decoder.clock.passes > 9:
            pending.packed[:, 5] = 7  # the first token that it commits
        return pending, state

    monkeypatch.setattr(StepRunner, "step", stale)
    made = StepRunner.__init__

    def capturing(self: StepRunner, *given: Any) -> None:
        made(self, *given)
        decode = next(item for item in given if isinstance(item, DecodeConfig))
        self.captures = decode.graph == "auto"

    monkeypatch.setattr(StepRunner, "__init__", capturing)
    assert result("captured")["result"] == "failed"


def test_a_wrong_gradient_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device's loss, which is computed before the CPU's, is half as large again."""
    loss, calls = BlockDrafter.loss, list[int]()

    def wrong(self: Any, batch: Any) -> LossOutput:
        calls.append(1)
        found = loss(self, batch)
        return replace(found, loss_sum=found.loss_sum * (1.5 if len(calls) == 1 else 1.0))

    monkeypatch.setattr(BlockDrafter, "loss", wrong)
    found = result("gradients")
    assert found["result"] == "failed"
    assert [line.split(",")[0] for line in found["failures"]] == ["gradients against a CPU's"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["eagle3", "dspark"])
def test_a_training_that_climbs_fails(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    step = TorchEngine.step
    monkeypatch.setattr(TorchEngine, "step", lambda self, rate: step(self, -rate))
    assert any("last loss" in line for line in result(name)["failures"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_a_counting_target_writes_its_known_text_in_every_dtype(dtype: torch.dtype) -> None:
    shape = replace(shapes.TOY, vocab=300)
    model = shapes.counting_model(shape, torch.device("cpu"), dtype, 64)
    requests = [Request(0, (5, 17, 200), 0, 20)]
    (text,) = shapes.texts(shapes.as_target(model), requests)  # refuses a text that differs
    assert text[:4] == [5, 17, 200, (200 + shapes.STRIDE) % 300]
    assert len(set(text[3:])) == 20


def test_a_text_that_is_not_the_targets_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = shapes.counting_model(shapes.TOY, torch.device("cpu"), torch.float32, 64)
    monkeypatch.setattr(shapes, "STRIDE", 1)
    with pytest.raises(UserError, match="does not write its known text"):
        shapes.texts(shapes.as_target(model), [Request(0, (5,), 0, 4)])
