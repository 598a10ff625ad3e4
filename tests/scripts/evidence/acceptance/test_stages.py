"""The parts of the acceptance runs at toy size: they pass as things are, and fail under wrong
kernels and gradients. All other faults are in `test_planted.py`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from heads.api.batch import LossOutput
from heads.api.errors import UserError
from heads.dflash import Drafter as BlockDrafter
from heads.kernels.reference.row_losses import ROW_LOSSES
from inference.decoding.requests import Request
from inference.kernels.reference.attention import TREE_ATTENTION
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
    "name", ["environment", "attention", "verification", "losses", "gradients", "trace"]
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
