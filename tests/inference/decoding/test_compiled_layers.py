"""Layers compiled as they are on a GPU before a step is captured: one graph for all of them, the
same tokens, and families whose layers need their cache are left alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from inference.decoding.config import DecodeConfig
from inference.decoding.engine import Engine
from inference.decoding.execution import graphs
from inference.decoding.execution.layers import compile_layers, has_merged
from inference.kernels import packed_linear
from inference.target import merged
from inference.target.kv_cache import SlotLayer
from inference.target.model import TargetModel
from tests.inference.decoding.slow_device import SlowDevice, every_engine_on
from tests.inference.decoding.test_lossless import requests
from tests.inference.decoding.test_lossless_kinds import drafter_of
from tests.models import random_target, texts_of

PART = merged._part


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
    return texts_of(engine, requests(3, new=10))


def test_layers_with_packed_weights_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights packed for the CPU are traced as plain ones, whose sums are rounded otherwise."""
    monkeypatch.setattr(packed_linear, "limits", lambda: packed_linear.EVERYTHING)
    target = random_target(dtype=torch.float32)
    assert compile_layers(target, rows=2, backend="eager")
    assert answers(target, 2) == answers(target, 2, compiled=False)


@pytest.mark.parametrize(
    ("family", "kinds", "checks"),
    [("llama", 1, 2), ("qwen3", 1, 2), ("gpt_neox", 1, 1), ("gemma2", 2, 4)],
)
def test_layers_share_a_graph_whatever_their_number(family: str, kinds: int, checks: int) -> None:
    """Sixteen layers, more than Dynamo compiles apart, are one graph each time a shape is new; with
    sliding and full attention in turn two. Merged projections are new to the second check, which
    compiles what two rows then run. Nothing breaks a graph."""
    target = random_target(family, num_hidden_layers=16)
    plain = answers(target, 2)
    assert compile_layers(target, rows=2, backend="eager")
    assert counters["stats"]["unique_graphs"] == checks
    assert answers(target, 2) == plain
    assert answers(target, 3, compiled=False)  # an engine that did not ask for it
    assert compile_layers(target, backend="eager")  # a second engine changes nothing
    assert counters["stats"]["unique_graphs"] == checks
    assert answers(target, 1) == plain
    assert counters["stats"]["unique_graphs"] == checks + kinds
    assert not counters["graph_break"]


@pytest.mark.parametrize(
    ("family", "reason"),
    [("deepseek_v3", "do not run without a cache"), ("longcat_flash", "not every layer")],
)
def test_layers_that_need_their_cache_stay_as_they_are(
    family: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Compressed keys are written before they are expanded; two attentions have two numbers."""
    target = random_target(family)
    plain = answers(target, 2)
    assert not compile_layers(target, backend="eager")
    assert reason in caplog.text
    assert not target.compiled_attention and not has_merged(target)
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
    assert not compile_layers(target, backend="eager")
    assert "without a cache, they change logits by" in caplog.text


def wrong_code(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
    """A compiler whose code computes a tenth too much."""
    return lambda *given: [1.1 * one for one in graph(*given)]


def no_code(*given: Any) -> Callable[..., Any]:
    """A compiler that fails."""
    raise LookupError("no such instruction")


def swapped_halves(*given: Any) -> Callable[[Tensor], Tensor]:
    """`_part` with the first half of a merged product in place of the second, and vice versa."""
    linear, shared, span, *rest = given
    total = len(shared.weight)
    if 2 * linear.out_features == total:
        span = slice(total - span.stop, total - span.start)
    return PART(linear, shared, span, *rest)


@pytest.mark.parametrize(
    ("backend", "part", "reason"),
    [
        ("eager", swapped_halves, "merged and compiled by eager, they change logits by"),
        (wrong_code, PART, "they change logits by"),
        (no_code, PART, "they do not run merged and compiled by"),
    ],
    ids=["merged wrongly", "compiled wrongly", "not compiled"],
)
def test_layers_that_are_compiled_wrongly_are_found_and_given_back(
    backend: Any, part: Any, reason: str, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """Merging has moved the weights all the same, and plain products read them there."""
    target = random_target(num_hidden_layers=2)
    plain = answers(target, 2)
    monkeypatch.setattr(merged, "_part", part)
    assert not compile_layers(target, backend=backend)
    assert reason in caplog.text
    assert has_merged(target) and not target.compiled_attention
    assert not any("forward" in vars(one) for one in target.model.modules())
    assert answers(target, 2) == plain


def test_drafters_do_not_keep_the_weights_before_merging(monkeypatch: pytest.MonkeyPatch) -> None:
    """The drafter was bound before, and plain decoding compiles first, as in a measurement."""
    target, checked = random_target(num_hidden_layers=2), list[tuple[int, int]]()

    def by_eager(target: TargetModel, rows: int, nodes: int) -> bool:
        checked.append((rows, nodes))
        return compile_layers(target, rows, nodes, "eager")

    monkeypatch.setattr(graphs, "compile_layers", by_eager)
    drafter = drafter_of("early_exit", target)
    config = DecodeConfig(batch_size=2, depth=2, compile=True)
    bound, bind = list[int](), type(drafter).bind
    monkeypatch.setattr(type(drafter), "bind", lambda *given: (bound.append(1), bind(*given))[1])
    plain = answers(target, 2)
    with every_engine_on(SlowDevice()):
        engines = [Engine(target, None, config.without_draft()), Engine(target, drafter, config)]
        engines.append(Engine(target, drafter, config))
        for engine in engines:
            assert texts_of(engine, requests(3, new=10)) == plain
    assert checked == [(2, 1), (2, 3), (2, 3)]
    now = {one.untyped_storage().data_ptr() for one in target.model.parameters()}
    for block in drafter._blocks:
        parts = [*vars(block.attention).values(), *vars(block.mlp).values()]
        tensors = [one.keywords["weight"] if isinstance(one, partial) else one for one in parts]
        held = {one.untyped_storage().data_ptr() for one in tensors if one is not None}
        assert held <= now
    assert len(bound) == 1  # steps captured in the meantime read what it held


@pytest.mark.slow
def test_layers_compiled_to_code_decode_the_same() -> None:
    # float64: on a CPU, float32 layers have packed weights of their own
    target = random_target(num_hidden_layers=2)
    plain = answers(target, 2)
    assert compile_layers(target)
    assert answers(target, 2) == plain
