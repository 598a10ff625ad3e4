"""Engines go on with new weights of the target: everything that was made of the old ones is made
again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from inference.decoding.config import DecodeConfig
from inference.decoding.engine import Engine
from inference.decoding.execution.compiled import CompiledStep
from inference.decoding.placement import PlacedDrafter, weights_on
from inference.target.model import TargetModel
from tests.heads.recipes import RECIPES, build
from tests.inference.decoding.test_lossless import requests
from tests.models import random_model, random_target

CONFIG = DecodeConfig(depth=3)
MADE = [name for name in RECIPES if name not in ("suffix", "ngram", "lookahead")]


def policy(dtype: torch.dtype = torch.float64) -> Any:
    return random_model("llama", 4).to(dtype)


def run(engine: Engine) -> dict[int, Any]:
    """Tokens and passes by request."""
    return {c.request.index: (c.tokens, c.passes) for c in engine.run(requests(2, 16))}


def moved(drafter: Any, target: TargetModel, name: str) -> Any:
    """A drafter of the same trained weights, made for another target as a checkpoint's load is."""
    fresh = build(name, target)
    if isinstance(drafter, torch.nn.Module):
        fresh.load_state_dict(drafter.state_dict())
        fresh.follow(target.weights)  # what a checkpoint holds of the old target is no weight of it
    return fresh


@pytest.mark.parametrize("name", MADE)
def test_drafters_of_every_recipe_draft_as_if_made_for_the_new_weights(name: str) -> None:
    target, fresh = random_target(), random_target(seed=4)
    engine = Engine(target, build(name, target), CONFIG)
    run(engine)
    engine.follow(policy())
    wanted = Engine(fresh, moved(engine.drafter, fresh, name), CONFIG)
    assert run(engine) == run(wanted)


def test_quantised_layers_are_packed_again() -> None:
    """With 8 bits nearly every draft is the target's own; of the old weights hardly one is."""
    target = random_target()
    engine = Engine(target, build("quantized_self", target, changes={"bits": 8}), CONFIG)
    before = sum(done.tau for done in engine.run(requests()))
    engine.follow(policy())
    after = sum(done.tau for done in engine.run(requests()))
    target.follow(random_target().model)  # the drafter is not told
    stale = sum(done.tau for done in engine.run(requests()))
    assert min(before, after) > 3 * 3 > 2 * stale


def test_a_frozen_lm_head_is_the_target_s_again_and_a_trained_one_stays() -> None:
    for trained in (False, True):
        target = random_target()
        drafter = build("eagle3", target, changes={"train_lm_head": trained})
        before = drafter.lm_head.weight.clone()
        Engine(target, drafter, CONFIG).follow(policy())
        rows = drafter.lm_head_rows(target.weights)
        assert torch.equal(drafter.lm_head.weight, before if trained else rows)


def test_a_drafter_on_another_device_gets_the_new_weights() -> None:
    target, fresh = random_target(), random_target(seed=4)
    engines = []
    for one in (target, fresh):
        inner = build("quantized_self", one, changes={"bits": 8})
        inner.follow(weights_on(one, "cpu"))
        engines.append(Engine(one, PlacedDrafter(inner, "cpu", "cpu"), CONFIG))
    engines[0].follow(policy())
    assert run(engines[0]) == run(engines[1])


def test_buffers_are_kept_until_weights_change() -> None:
    target = random_target()
    drafter = build("eagle3", target)
    engine = Engine(target, drafter, CONFIG)
    run(engine)
    lanes = engine._kept.lanes
    run(engine)
    assert engine._kept.lanes is lanes
    with torch.no_grad():
        drafter.fc.weight.mul_(1.5)  # as a refresh does
    run(engine)
    assert engine._kept.lanes is not lanes
    lanes = engine._kept.lanes
    engine.follow(policy())
    run(engine)
    assert engine._kept.lanes is not lanes


@pytest.mark.slow
def test_compiled_steps_follow() -> None:
    """Weights are constants of a compiled step: target and drafter change, the steps with them."""
    target = random_target(dtype=torch.float32)
    fresh = random_target(dtype=torch.float32, seed=4)
    drafter = build("eagle3", target)
    engine = Engine(target, drafter, replace(CONFIG, compile=True))
    run(engine)
    assert engine._kept.lanes is not None
    assert isinstance(engine._kept.lanes.runner.compiled, CompiledStep)
    engine.follow(policy(torch.float32))
    with torch.no_grad():
        drafter.fc.weight.mul_(1.5)
    wanted = Engine(fresh, moved(drafter, fresh, "eagle3"), CONFIG)
    assert run(engine) == run(wanted)
