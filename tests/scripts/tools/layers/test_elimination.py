"""Layers taken away one after the other: the divergence is that of transformers' model with fewer
layers, the sets are nested, and a target is whole again behind it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from inference.target.model import TargetModel
from scripts.tools.layers.elimination import Divergence, nested_sets, only_layers
from scripts.tools.layers.search import SearchConfig, search_layers
from tests.models import random_target
from tests.scripts.tools.layers.test_search import PARTS, planned

TEXTS = [[5, 9, 11, 3, 8], [7, 2, 6, 4, 4, 10, 12]]


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_the_divergence_is_that_of_a_model_with_these_layers(family: str) -> None:
    target = random_target(family)
    divergence = Divergence(target, TEXTS)
    layers = list(range(target.info.num_layers))
    assert divergence(tuple(layers)) == pytest.approx(0.0, abs=1e-6)
    fewer = smaller(target, (0, layers[-1]))
    total = 0.0
    for text in TEXTS:
        tokens = torch.tensor([text])
        with torch.no_grad():
            whole, part = (
                model(input_ids=tokens).logits[0].double().softmax(-1)
                for model in (smaller(target, tuple(layers)), fewer)
            )
        total += float((whole * (whole / part).log()).sum())
    wanted = total / sum(map(len, TEXTS))
    assert divergence((0, layers[-1])) == pytest.approx(wanted, rel=1e-3)
    assert divergence(tuple(layers)) == pytest.approx(0.0, abs=1e-6)


def smaller(target: TargetModel, kept: tuple[int, ...]) -> Any:
    """transformers' own model with the weights of these layers."""
    config = copy.deepcopy(target.model.config)
    config.num_hidden_layers = len(kept)
    config.layer_types = list(getattr(config, "layer_types", None) or [])[: len(kept)] or None
    config._attn_implementation = "eager"
    state = {}
    for name, weight in target.model.state_dict().items():
        before, middle, rest = name.partition(".layers.")
        number, _, inner = rest.partition(".")
        if not middle:
            state[name] = weight
        elif int(number) in kept:
            state[f"{before}.layers.{kept.index(int(number))}.{inner}"] = weight
    model = type(target.model)(config).to(target.dtype).eval()
    model.load_state_dict(state)
    return model


def test_a_target_is_whole_behind_an_error() -> None:
    target = random_target()
    before = list(target.model.model.layers)
    with pytest.raises(RuntimeError), only_layers(target, (0,)):
        fail(target)
    assert list(target.model.model.layers) == before


def fail(target: TargetModel) -> None:
    assert len(target.model.model.layers) == 1
    raise RuntimeError


def test_sets_are_nested_and_the_best_of_each_step() -> None:
    worth = {0: 5.0, 1: 0.1, 2: 3.0, 3: 0.2, 4: 4.0}
    found = nested_sets(5, lambda kept: sum(worth[one] for one in worth if one not in kept))
    assert found == [(0, 2, 3, 4), (0, 2, 4), (0, 4), (0,)]


def test_a_search_tries_them_first() -> None:
    first = [tuple(part.layer in (0, 5, 9) for part in PARTS)]
    found = search_layers(PARTS, planned(3), SearchConfig(8, 4, 0.2), first)
    assert found.trials[0].kept == first[0]
