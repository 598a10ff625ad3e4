"""What only a GPU can show: no synchronisation in a step, and a captured graph that decodes what
launched steps decode.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from inference.decoding.config import DecodeConfig
from inference.decoding.engine import Engine
from inference.decoding.execution.graphs import WARM_UP_STEPS
from inference.target.loading import TargetConfig, describe, switch_attention
from inference.target.model import TargetModel
from tests.heads.recipes import RECIPES, build
from tests.inference.decoding.test_lossless import requests
from tests.inference.decoding.test_no_sync import ALL_SHAPES
from tests.models import TokenIds, random_model, texts_of

pytestmark = pytest.mark.gpu


def cuda_target(dtype: torch.dtype = torch.float32) -> TargetModel:
    model = random_model("llama").to("cuda", dtype)
    switch_attention(model)
    tokenizer = TokenIds()
    return TargetModel(
        model, tokenizer, describe(model, tokenizer, TargetConfig(path="random/llama"))
    )


def drafter_on(target: TargetModel, kind: str) -> Any:
    return build(kind, target, shaken=0.0)


@contextmanager
def synchronisation_forbidden() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def tokens(engine: Engine, count: int = 3) -> dict[int, list[int]]:
    return texts_of(engine, requests(count, new=30))


@pytest.mark.parametrize("shape", ALL_SHAPES)
@pytest.mark.parametrize("kind", RECIPES)
def test_captured_steps_decode_what_launched_steps_decode(kind: str, shape: str) -> None:
    target = cuda_target()
    drafter = drafter_on(target, kind)
    texts = []
    for graph, runs in (("off", 1), ("auto", 2)):
        config = DecodeConfig(batch_size=2, graph=graph, temperature=1.0, **ALL_SHAPES[shape])
        engine = Engine(target, drafter, config, capacity=128)
        texts += [tokens(engine) for _ in range(runs)]  # the last replays from its first step on
        assert engine._kept.lanes.runner.captured == (graph == "auto")  # type: ignore[union-attr]
    assert all(text == texts[0] for text in texts)


@pytest.mark.parametrize("kind", RECIPES)
def test_a_step_never_synchronises(kind: str) -> None:
    target = cuda_target()
    engine = Engine(
        target, drafter_on(target, kind), DecodeConfig(batch_size=2, graph="off"), capacity=128
    )
    tokens(engine, 2)
    lanes = engine._kept.lanes
    assert lanes is not None
    lanes.rows.active.fill_(True)
    torch.cuda.synchronize()
    with synchronisation_forbidden():
        lanes.runner.decoder.step(lanes.cache, lanes.rows, lanes.state, None)


def test_replayed_steps_never_synchronise() -> None:
    target = cuda_target()
    engine = Engine(target, drafter_on(target, "eagle3"), DecodeConfig(batch_size=2), capacity=256)
    run = engine.run(requests(2, new=120), yield_steps=True)
    while engine.clock.passes <= WARM_UP_STEPS + 2:
        next(run)
    with (
        synchronisation_forbidden()
    ):  # the host reads results through events, which this mode does not forbid
        for _ in range(6):
            next(run)


def test_the_clock_splits_replayed_steps() -> None:
    target = cuda_target()
    engine = Engine(target, drafter_on(target, "medusa"), DecodeConfig(), capacity=256)
    tokens(engine)
    engine.clock.reset()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    tokens(engine, 20)
    wall = time.perf_counter() - begin
    assert all(engine.clock.seconds[phase] > 0 for phase in ("draft", "verify", "commit"))
    assert sum(engine.clock.seconds.values()) == pytest.approx(wall, rel=0.05)
    engine.clock.require_agreement()
