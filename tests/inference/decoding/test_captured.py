"""A step recorded once and replayed for other prompts, as a CUDA graph will: here traced on the
CPU, operation by operation.

The trace freezes everything that Python decided while recording: shapes, branches, numbers that
were read from tensors. Replayed in the same buffers for other prompts and lengths, it gives the
right tokens only if a step depends on nothing but its buffers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from heads.api.registry import kind_names
from inference.decoding.buffers import Lanes
from inference.decoding.config import DecodeConfig
from inference.decoding.engine import Engine
from inference.decoding.execution.graphs import Pending
from tests.inference.decoding.test_lossless import requests
from tests.inference.decoding.test_lossless_kinds import drafter_of
from tests.inference.decoding.test_no_sync import ALL_SHAPES
from tests.inference.steps import step_on_device, under_way
from tests.models import random_target


def record(lanes: Lanes) -> Callable[[], Tensor]:
    """One step as a graph of tensor operations on the lanes' own buffers."""
    with torch.no_grad():
        traced = make_fx(lambda: step_on_device(lanes), tracing_mode="real")()
    return lambda: traced()  # the graph holds the buffers as constants


def replayed(engine: Engine, step: Callable[[], Tensor]) -> None:
    """Make the engine's lanes replay `step`."""
    lanes = engine._lanes
    assert lanes is not None

    @torch.no_grad()
    def replay(state: Any, longest: int, exact: bool, length: object) -> tuple[Pending, Any]:
        return Pending(step()), state

    lanes.runner.step = replay  # type: ignore[method-assign]


CASES = [(kind, shape, 1.0) for kind in kind_names() for shape in ALL_SHAPES] + [
    ("eagle3", "dynamic", 0.0)
]


@pytest.mark.parametrize(("kind", "shape", "temperature"), CASES)
def test_a_recorded_step_decodes_other_prompts(kind: str, shape: str, temperature: float) -> None:
    target = random_target()
    drafter = drafter_of(kind, target)
    config = DecodeConfig(temperature=temperature, batch_size=2, **ALL_SHAPES[shape])
    engine = Engine(target, drafter, config, capacity=96)
    engine._lanes = under_way(target, drafter, config, count=2)
    replayed(engine, record(engine._lanes))
    items = requests(5)
    plain = {
        c.request.index: c.tokens
        for c in Engine(target, None, DecodeConfig(temperature=temperature)).run(items)
    }
    assert {c.request.index: c.tokens for c in engine.run(items)} == plain


def test_a_step_that_reads_a_length_on_the_host_is_caught() -> None:
    """The control: a trace made with the host's bound on the lengths must fail on longer
    prompts."""
    target = random_target()
    config = DecodeConfig(batch_size=2)
    engine = Engine(target, None, config, capacity=96)
    engine._lanes = lanes = under_way(target, None, config, count=2, first=1)
    longest = int(lanes.rows.lengths.max())

    def bounded() -> Tensor:
        return lanes.runner.decoder.step(lanes.cache, lanes.rows, None, longest)[0].packed()

    with torch.no_grad():
        traced = make_fx(bounded, tracing_mode="real")()
    replayed(engine, lambda: traced())
    items = requests(4)
    plain = {c.request.index: c.tokens for c in Engine(target).run(items)}
    assert {c.request.index: c.tokens for c in engine.run(items)} != plain
