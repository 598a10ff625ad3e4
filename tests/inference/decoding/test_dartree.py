"""Trees that grow from one pass, through the whole decoder: every recipe that can draft them, under
every rule that takes trees, without a question to the device; what the settings mean. (How they
grow: tests/heads/test_dartree.py.)"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from heads.api.errors import UserError
from heads.api.registry import get_kind
from heads.api.tree import DartreeShape
from inference.decoding.config import DecodeConfig
from inference.decoding.draft import Draft
from inference.decoding.engine import Engine
from inference.decoding.requests import Completion
from inference.decoding.rules.names import CHAINS_ONLY, RULES
from inference.decoding.rules.registry import check_shape
from inference.decoding.sampling.distribution import SamplingSettings
from inference.decoding.sampling.noise import SharedNoise
from inference.decoding.sampling.row_settings import RowNoise, RowSettings
from inference.decoding.session import Session
from tests.heads.recipes import RECIPES, recipe
from tests.inference.decoding.test_captured import record, replayed
from tests.inference.decoding.test_lossless import decode, requests
from tests.inference.decoding.test_lossless_kinds import drafter_of
from tests.inference.decoding.test_session import alone, mixed, served
from tests.inference.steps import NoHost, step_on_device, under_way
from tests.models import VOCAB, plain_texts, random_target, texts_of

DARTREE: dict[str, Any] = {"shape": "dartree", "nodes": 10, "depth": 3, "width": 4, "candidates": 9}
ONE_PASS = [
    name for name in RECIPES if getattr(get_kind(recipe(name)[0]).drafter_class, "one_pass", False)
]
EXAMPLES = ("dflash", "dspark", "domino", "dflash2", "lilicorr", "treeflash", "medusa", "pard")
"""One recipe of every way in which slots depend on each other, and other kinds."""
ITEMS = requests(5, new=14)


def texts(found: dict[int, Completion]) -> dict[int, list[int]]:
    return {index: completion.tokens for index, completion in found.items()}


@cache
def plain(temperature: float) -> dict[int, list[int]]:
    return plain_texts(ITEMS, temperature=temperature)


def test_every_block_drafter_is_among_the_recipes() -> None:
    assert set(EXAMPLES) < set(ONE_PASS) and {"jetspec", "dflare", "peagle"} < set(ONE_PASS)


@pytest.mark.rotated
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", ONE_PASS)
def test_lossless_in_a_refilled_ragged_batch(name: str, temperature: float) -> None:
    target = random_target()
    config = DecodeConfig(temperature=temperature, batch_size=3, **DARTREE)
    assert texts(decode(target, drafter_of(name, target), config, ITEMS)) == plain(temperature)


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule not in CHAINS_ONLY])
@pytest.mark.parametrize("name", ["dspark", "medusa"])
def test_every_rule_for_trees_takes_them(name: str, rule: str) -> None:
    """At temperature 0 all keep the text; above it those that keep the distribution take drafts
    that chose their tree as certain, and so keep the text as well."""
    target = random_target()
    for temperature in (0.0, 1.0) if rule != "typical" else (0.0,):
        config = DecodeConfig(temperature=temperature, rule=rule, batch_size=2, **DARTREE)
        found = texts(decode(target, drafter_of(name, target), config, ITEMS))
        assert found == plain(temperature)


@pytest.mark.parametrize("rule", CHAINS_ONLY)
def test_rules_for_chains_refuse_them(rule: str) -> None:
    with pytest.raises(UserError, match="needs a chain; given: a tree of 10 nodes"):
        DecodeConfig(rule=rule, **DARTREE)
    check_shape("traversal", DartreeShape(6, 3, 3, 8))


@pytest.mark.rotated
@pytest.mark.parametrize(
    ("name", "temperature"), [*((name, 1.0) for name in ONE_PASS), ("dspark", 0.0)]
)
def test_a_step_asks_the_device_for_nothing(name: str, temperature: float) -> None:
    target = random_target()
    config = DecodeConfig(temperature=temperature, batch_size=3, **DARTREE)
    lanes = under_way(target, drafter_of(name, target), config)
    with NoHost():
        step_on_device(lanes)


@pytest.mark.rotated
@pytest.mark.parametrize(
    ("name", "temperature"), [*((name, 1.0) for name in EXAMPLES), ("dspark", 0.0)]
)
def test_a_recorded_step_decodes_other_prompts(name: str, temperature: float) -> None:
    target = random_target()
    drafter = drafter_of(name, target)
    config = DecodeConfig(temperature=temperature, batch_size=2, **DARTREE)
    engine = Engine(target, drafter, config, capacity=96)
    engine._kept.lanes = lanes = under_way(target, drafter, config, count=2)
    replayed(engine, record(lambda: step_on_device(lanes)))
    assert texts_of(engine, ITEMS) == plain(temperature)


@pytest.mark.rotated
@pytest.mark.parametrize("name", EXAMPLES)
def test_a_batch_and_its_refills_draft_what_single_rows_draft(name: str) -> None:
    target, config = random_target(), DecodeConfig(temperature=1.0, **DARTREE)
    single = decode(target, drafter_of(name, target), config, ITEMS)
    pair = replace(config, batch_size=2)
    batched = decode(target, drafter_of(name, target), pair, ITEMS)
    assert {i: c.passes for i, c in batched.items()} == {i: c.passes for i, c in single.items()}


@pytest.mark.parametrize("name", ["dspark", "medusa"])
def test_requests_with_settings_of_their_own_get_their_own_text(name: str) -> None:
    target, items = random_target(), mixed()
    config = DecodeConfig(batch_size=4, lag=2, **DARTREE)
    with Session(Engine(target, drafter_of(name, target), config), 60) as session:
        found = served(session, items, 2)
    assert found == {item.index: alone(item) for item in items}


@pytest.mark.parametrize("static", [False, True])
def test_rows_temper_differences_as_a_batch_of_their_temperature_does(static: bool) -> None:
    temperatures = (0.0, 0.5, 1.0, 3.0)
    settings = [SamplingSettings(temperature) for temperature in temperatures]
    own = RowSettings(4, SamplingSettings(), VOCAB, torch.device("cpu"), static)
    seeds = torch.arange(4)
    noise = RowNoise(own, seeds, VOCAB)
    generator = torch.Generator().manual_seed(3)
    added = torch.randn(4, 3, 7, generator=generator)
    assert torch.equal(noise.tempered(added), added)  # all greedy
    own.put(range(4), settings)
    own.arrange(range(4))
    for row, item in enumerate(settings):
        expected = SharedNoise(item, seeds, VOCAB).tempered(added)[row]
        assert torch.equal(noise.tempered(added)[row], expected)
        assert torch.equal(expected, added[row] / (item.temperature or 1.0))


def test_grown_trees_accept_more_than_chains_of_their_depth() -> None:
    """A tree that holds the likeliest path accepts as much or more at every step."""
    target = random_target()
    for name in ("dflash", "medusa"):
        passes = []
        for shape in ({"shape": "chain", "depth": 4}, {**DARTREE, "depth": 4, "nodes": 16}):
            config = DecodeConfig(temperature=1.0, batch_size=4, **shape)
            found = decode(target, drafter_of(name, target), config, ITEMS)
            passes.append(sum(len(c.passes) for c in found.values()))
        assert passes[1] < passes[0]


def test_settings_say_what_is_grown() -> None:
    config = DecodeConfig(**DARTREE, depth_penalty=0.5)
    assert config.tree() == DartreeShape(10, 3, 4, 9, 0.5)
    assert DecodeConfig(shape="dartree").tree() == DartreeShape(17, 4, 8, 64, 0.2)
    assert replace(config, rule="auto", temperature=1.0).acceptance == "match"
    with pytest.raises(UserError, match=r"grows 12 nodes at most; decode\.nodes must be 13 or"):
        DecodeConfig(**{**DARTREE, "nodes": 14}).tree()


def test_a_draft_is_written_down_with_all_that_matters() -> None:
    draft = Draft("dartree", 3, (), 10, 4, 9, 0.5)
    assert draft.plain() == {**DARTREE, "depth_penalty": 0.5}
    assert Draft.read(draft.plain()) == draft and draft.size == 10 and draft.family == "dartree"
    assert draft.tree(DecodeConfig()) == DartreeShape(10, 3, 4, 9, 0.5)
    assert draft.label == "dartree 10, depth 3, penalty 0.5"
    with pytest.raises(UserError, match="grows 12 nodes at most"):
        Draft.read({**draft.plain(), "nodes": 30})
