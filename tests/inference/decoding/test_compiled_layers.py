"""Layers compiled one by one, as they are on a GPU before a step is captured: the same tokens,
compiled once."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.utils import counters

from inference.decoding.config import DecodeConfig
from inference.decoding.engine import Engine
from inference.decoding.execution.graphs import compile_layers
from tests.inference.decoding.test_lossless import requests
from tests.inference.decoding.test_lossless_kinds import drafter_of
from tests.models import random_target


@pytest.mark.slow
def test_compiled_layers_decode_the_same_and_compile_once() -> None:
    # float64: on a CPU, float32 layers have packed weights of their own
    target = random_target(num_hidden_layers=2)
    items = requests(3, new=10)
    config = DecodeConfig(batch_size=2, depth=2)
    drafter = drafter_of("medusa", target)
    plain = {c.request.index: c.tokens for c in Engine(target, drafter, config).run(items)}
    torch.compiler.reset()
    counters.clear()
    compile_layers(target)
    compile_layers(target)  # a second engine changes nothing
    engine = Engine(target, drafter, config, capacity=64)
    assert {c.request.index: c.tokens for c in engine.run(items)} == plain
    compiled = counters["stats"]["unique_graphs"]
    assert compiled > 0
    assert {c.request.index: c.tokens for c in engine.run(items[::-1])} == plain
    assert counters["stats"]["unique_graphs"] == compiled
