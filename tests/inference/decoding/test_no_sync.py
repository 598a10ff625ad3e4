"""No step asks the device for anything: every kind, shape, rule and sampling setting, watched
operation by operation."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from inference.decoding.config import DecodeConfig
from tests.heads.recipes import RECIPES
from tests.inference.decoding.test_lossless import SHAPES
from tests.inference.decoding.test_lossless_kinds import drafter_of
from tests.inference.steps import NoHost, step_on_device, under_way
from tests.models import random_target

ALL_SHAPES: dict[str, dict[str, Any]] = {
    **SHAPES,
    "dynamic": {"shape": "dynamic", "nodes": 9, "depth": 3, "width": 3},
}
SAMPLING: dict[str, dict[str, Any]] = {
    "filters": {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    "repetition": {"repetition_penalty": 1.3},
    "bias": {"temperature": 1.0, "logit_bias": ((5, -2.0), (9, 1.5))},
    "bad words": {"bad_words": ((7,), (3, 4), (8, 9, 10))},
}


@pytest.mark.rotated
@pytest.mark.parametrize("shape", ALL_SHAPES)
@pytest.mark.parametrize(
    ("name", "temperature"),
    [*((name, 1.0) for name in RECIPES), ("eagle3", 0.0), ("dflash", 0.0), ("ngram", 0.0)],
)
def test_a_step_of_every_kind(name: str, shape: str, temperature: float) -> None:
    target = random_target()
    config = DecodeConfig(temperature=temperature, batch_size=3, **ALL_SHAPES[shape])
    lanes = under_way(target, drafter_of(name, target), config)
    with NoHost():
        step_on_device(lanes)


@pytest.mark.rotated
@pytest.mark.parametrize("sampling", SAMPLING)
def test_a_step_of_plain_decoding_with_every_setting(sampling: str) -> None:
    lanes = under_way(random_target(), None, DecodeConfig(batch_size=3, **SAMPLING[sampling]))
    with NoHost():
        step_on_device(lanes)


@pytest.mark.rotated
@pytest.mark.parametrize("shape", ["chain", "tree"])
@pytest.mark.parametrize("sampling", SAMPLING)
def test_a_drafted_step_with_every_setting(sampling: str, shape: str) -> None:
    target = random_target()
    config = DecodeConfig(batch_size=3, **SAMPLING[sampling], **ALL_SHAPES[shape])
    lanes = under_way(target, drafter_of("eagle3", target), config)
    with NoHost():
        step_on_device(lanes)


@pytest.mark.rotated
@pytest.mark.parametrize(
    ("rule", "shape"),
    [
        ("rejection", "chain"),
        ("block", "chain"),
        ("specinfer", "chain"),
        ("specinfer", "tree"),
        ("specinfer", "dynamic"),
        ("typical", "chain"),
        ("typical", "tree"),
        ("typical", "dynamic"),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", ["eagle3", "ngram"])
def test_a_step_of_every_rule(kind: str, rule: str, shape: str, temperature: float) -> None:
    target = random_target()
    config = DecodeConfig(
        temperature=temperature, top_p=0.95, rule=rule, batch_size=3, **ALL_SHAPES[shape]
    )
    lanes = under_way(target, drafter_of(kind, target), config)
    with NoHost():
        step_on_device(lanes)


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gemma3_text", "gpt2", "phi"])
def test_a_step_of_other_families(family: str) -> None:
    target = random_target(family)
    lanes = under_way(target, drafter_of("medusa", target), DecodeConfig(batch_size=3))
    with NoHost():
        step_on_device(lanes)


@pytest.mark.parametrize(
    "offence",
    [
        lambda x: x.sum().item(),
        lambda x: bool(x.any()),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: x + torch.tensor([1, 2, 3]),
        lambda x: torch.isin(x, x),
    ],
)
def test_the_watch_notices(offence: Any) -> None:
    with NoHost(), pytest.raises(AssertionError, match="inside a step"):
        offence(torch.arange(3))
