"""Dynamic trees through the whole decoder: every kind is lossless, and what a node's children are
drawn from is what the drafter says along the node's path.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from heads.api.drafter import TargetStates
from heads.api.tree import DynamicShape, Ranking, TokenTree
from inference.decoding.config import DecodeConfig
from inference.decoding.engine import Engine
from inference.decoding.requests import Completion
from inference.decoding.sampling.distribution import SamplingSettings
from inference.decoding.sampling.noise import SharedNoise, Stream
from inference.target.model import TargetModel
from tests.fakes import RandomTrees
from tests.heads.explicit import PAIR
from tests.heads.micro import ForcedNoise, micro_target, seen_states
from tests.heads.recipes import build
from tests.inference.decoding.test_lossless import answers, decode, requests
from tests.inference.decoding.test_lossless_kinds import drafter_of
from tests.inference.steps import NoHost
from tests.models import VOCAB, random_target

FAMILIES = ["llama", "mistral", "gpt2"]
ITEMS = requests(4, new=14)
DYNAMIC: dict[str, Any] = {"shape": "dynamic", "depth": 4, "nodes": 14, "width": 3}


@cache
def target_of(family: str) -> TargetModel:
    return random_target(family)


@cache
def plain_of(family: str, temperature: float) -> dict[int, Completion]:
    """What decoding without a drafter says."""
    return decode(
        target_of(family), None, DecodeConfig(temperature=temperature, batch_size=4), ITEMS
    )


def texts(found: dict[int, Completion]) -> dict[int, list[int]]:
    return {index: completion.tokens for index, completion in found.items()}


@pytest.mark.parametrize("ranking", list(Ranking))
@pytest.mark.parametrize("kind", ["eagle3", "medusa"])
def test_rankings_change_the_tree_and_never_the_text(kind: str, ranking: Ranking) -> None:
    target = target_of("llama")
    engine = Engine(
        target, drafter_of(kind, target), DecodeConfig(temperature=1.0, batch_size=2, **DYNAMIC)
    )
    engine.tree = replace(engine.tree, ranking=ranking)
    assert texts({c.request.index: c for c in engine.run(ITEMS)}) == texts(plain_of("llama", 1.0))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_tree_of_its_own_for_every_row_is_lossless(
    family: str, temperature: float, batch_size: int
) -> None:
    plain = plain_of(family, temperature)
    config = DecodeConfig(temperature=temperature, batch_size=batch_size, **DYNAMIC)
    found = decode(target_of(family), RandomTrees(answers(plain), VOCAB), config, ITEMS)
    assert texts(found) == texts(plain)
    accepted = [p.accepted for c in found.values() for p in c.passes]
    assert {0, 1, 2} <= set(accepted)  # paths of all lengths, in trees of all shapes


@pytest.mark.parametrize("kind", ["eagle3", "distilled", "medusa"])
def test_a_batch_and_its_refills_draft_what_single_rows_draft(kind: str) -> None:
    target = target_of("llama")
    alone = decode(
        target, drafter_of(kind, target), DecodeConfig(temperature=1.0, **DYNAMIC), ITEMS
    )
    config = DecodeConfig(temperature=1.0, batch_size=2, **DYNAMIC)
    batched = decode(target, drafter_of(kind, target), config, ITEMS)
    assert {i: c.passes for i, c in batched.items()} == {i: c.passes for i, c in alone.items()}


def shared_noise(vocab: int, temperature: float) -> SharedNoise:
    settings = SamplingSettings(temperature, 0, 1.0, 0.0)
    noise = SharedNoise(settings, torch.tensor([11, 12]), vocab, Stream.TARGET)
    noise.keeps_logits = True  # at temperature 0 as well, where no rule asks for them
    return noise


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", ["eagle3", "distilled", "medusa"])
@torch.no_grad()
def test_a_nodes_logits_are_those_of_a_chain_along_its_path(kind: str, temperature: float) -> None:
    """float64: the drafter's cache holds exactly each node's ancestors, at the right positions,
    after commits as well.
    """
    target, shape = micro_target(), DynamicShape(20, 4, 4)
    drafter = build(kind, target)
    noise = shared_noise(target.info.vocab_size, temperature)
    ends, seen = (8, 6), seen_states(target, drafter.needs, PAIR, [(0, 7), (0, 5)])
    more = seen_states(target, drafter.needs, PAIR, [(7, 8), (5, 6)])
    state = drafter.start(seen, shape, 32)
    drafter.propose(state, noise)  # leaves rows of rejected nodes in the cache
    proposal = drafter.propose(drafter.commit(state, more), noise)
    assert proposal.logits is not None and not proposal.logits.isnan().any()
    parents = proposal.tree.parents.tolist()
    for row, end in enumerate(ends):
        tokens, checked = proposal.tokens[row].tolist(), 0
        paths: list[tuple[int, ...]] = [()]
        for node in range(1, shape.nodes):
            paths.append((*paths[parents[row][node]], tokens[node]))
        for node in sorted(set(parents[row])):
            documents = [
                document[: last + 1] + list(paths[node])
                for document, last in zip(PAIR, ends, strict=True)
            ]
            forced = ForcedNoise(documents)
            chain = drafter.start(seen, TokenTree.chain(len(paths[node]) + 1), 32)
            drafter.propose(drafter.commit(chain, more), forced)
            expected = forced.logits[row, end + 1 + len(paths[node])]
            torch.testing.assert_close(proposal.logits[row, node], expected, rtol=1e-11, atol=1e-11)
            checked += len(paths[node]) > 0
        assert checked >= 3


@pytest.mark.parametrize("kind", ["eagle3", "distilled", "medusa", "ngram"])
@torch.no_grad()
def test_dynamic_steps_do_not_wait_for_the_host(kind: str) -> None:
    target = micro_target()
    drafter = build(kind, target)
    shape = DynamicShape(9, 3, 3)
    state = drafter.start(seen_states(target, drafter.needs, PAIR, [(0, 7), (0, 5)]), shape, 32)
    accepted = seen_states(target, drafter.needs, PAIR, [(7, 9), (5, 6)])
    noise = shared_noise(target.info.vocab_size, 1.0)
    with NoHost():
        drafter.propose(state, noise)
        state = drafter.commit(state, accepted)
        second = drafter.propose(state, noise)
    assert second.tokens[:, 0].tolist() == [PAIR[0][9], PAIR[1][6]]


def test_lookup_fills_a_chain_as_long_as_fits() -> None:
    target = micro_target()
    drafter = build("ngram", target)
    tokens = torch.tensor([[5, 6, 7, 5, 6]])
    seen = TargetStates(
        tokens[:, :-1], tokens[:, 1:], torch.arange(4)[None], torch.ones(1, 4, dtype=torch.bool)
    )
    for shape, expected in (
        (DynamicShape(9, 3, 4), [6, 7, 5, 6]),
        (DynamicShape(3, 3, 4), [6, 7, 5]),
    ):
        proposal = drafter.propose(
            drafter.start(seen, shape, 16), shared_noise(target.info.vocab_size, 0.0)
        )
        assert proposal.tree.is_chain and proposal.tokens[0].tolist() == expected


def test_dynamic_trees_accept_more_than_chains_of_their_depth() -> None:
    """A tree that contains the chain can only accept as much or more at every step; over a text it
    must come out ahead.
    """
    target = target_of("llama")
    for kind in ("medusa", "distilled"):
        passes = []
        for shape in ({"shape": "chain", "depth": 4}, {**DYNAMIC, "nodes": 24, "width": 4}):
            config = DecodeConfig(temperature=1.0, batch_size=4, **shape)
            found = decode(target, drafter_of(kind, target), config, ITEMS)
            passes.append(sum(len(c.passes) for c in found.values()))
        assert passes[1] < passes[0]
