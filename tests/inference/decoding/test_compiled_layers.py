"""Layers compiled as they are on a GPU before a step is captured: one graph for all of them, the
same tokens, and families whose layers need their cache are left alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from inference.decoding.config import DecodeConfig
from inference.decoding.engine import Engine
from inference.decoding.execution.layers import compile_layers
from inference.target.kv_cache import SlotLayer
from inference.target.model import TargetModel
from tests.inference.decoding.test_lossless import requests
from tests.inference.decoding.test_lossless_kinds import drafter_of
from tests.models import random_target


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """Nothing is compiled before a test, and nothing of it is kept."""
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


def answers(target: TargetModel, batch_size: int, compiled: bool = True) -> dict[int, list[int]]:
    """Drafted by Medusa heads in ragged batches. compiled: as `decode.compile` on a GPU leaves the
    cache; without compiled layers it means nothing."""
    config = DecodeConfig(batch_size=batch_size, depth=2)
    engine = Engine(target, drafter_of("medusa", target), config, capacity=64)
    engine._kept.lanes = engine.new_lanes(batch_size, 64, details=False)
    engine._kept.lanes.cache.writer.compiled = compiled
    return {c.request.index: c.tokens for c in engine.run(requests(3, new=10))}


@pytest.mark.parametrize(
    ("family", "trial", "graphs"),
    [("llama", 1, 3), ("qwen3", 1, 3), ("gpt_neox", 1, 2), ("gemma2", 2, 6)],
)
def test_layers_share_a_graph_whatever_their_number(family: str, trial: int, graphs: int) -> None:
    """Sixteen layers, more than Dynamo compiles apart, are one graph each time a shape is new; with
    sliding and full attention in turn two. Merged projections make the trial's shape, one row,
    a new one. Nothing breaks a graph."""
    target = random_target(family, num_hidden_layers=16)
    plain = answers(target, 2)
    assert compile_layers(target, "eager")
    assert counters["stats"]["unique_graphs"] == trial
    assert answers(target, 2) == plain
    assert counters["stats"]["unique_graphs"] == 2 * trial
    assert answers(target, 3, compiled=False)  # an engine that did not ask for it
    assert counters["stats"]["unique_graphs"] == 2 * trial
    assert compile_layers(target, "eager")  # a second engine changes nothing
    assert answers(target, 2) == answers(target, 1) == plain
    assert counters["stats"]["unique_graphs"] == graphs
    assert not counters["graph_break"]


@pytest.mark.parametrize(
    ("family", "reason"),
    [("deepseek_v3", "do not compile without a cache"), ("longcat_flash", "not every layer")],
)
def test_layers_that_need_their_cache_stay_as_they_are(
    family: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Compressed keys are written before they are expanded; two attentions have two numbers."""
    target = random_target(family)
    plain = answers(target, 2)
    assert not compile_layers(target, "eager")
    assert reason in caplog.text
    assert not target.compiled_attention
    assert answers(target, 2) == plain


def test_layers_that_would_compute_something_else_are_found(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A cache that changes what it is given shows as a difference of the logits."""
    target = random_target()
    update = SlotLayer.update

    def changed(self: SlotLayer, keys: Any, *rest: Any) -> Any:
        if target.compiled_attention and not torch.compiler.is_compiling():
            seen = update(self, keys, *rest)
            return seen[0] * (
                1.0 if "forward" not in target.taps.layers[0].__dict__ else 1.5
            ), seen[1]
        return update(self, keys, *rest)

    monkeypatch.setattr(SlotLayer, "update", changed)
    assert not compile_layers(target, "eager")
    assert "compute something else" in caplog.text


@pytest.mark.slow
def test_layers_compiled_to_code_decode_the_same() -> None:
    # float64: on a CPU, float32 layers have packed weights of their own
    target = random_target(num_hidden_layers=2)
    plain = answers(target, 2)
    assert compile_layers(target)
    assert answers(target, 2) == plain
