"""What every rule owes the loop: found by name, the right shapes, `match` where nothing is weighed,
no question to the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from heads.api.drafter import Proposal
from heads.api.errors import UserError
from heads.api.tree import DraftShape, DynamicShape, TokenTree
from heads.nn.drafting.plan import make_plan
from inference.decoding import config as decode_config
from inference.decoding.config import DecodeConfig
from inference.decoding.engine import Engine
from inference.decoding.rules.base import Rule
from inference.decoding.rules.match import Match
from inference.decoding.rules.names import (
    CHAINS_ONLY,
    LOSSY,
    PROMISES,
    RULES,
    TEXT,
    promise,
    rule_text,
)
from inference.decoding.rules.registry import check_shape, get_rule
from inference.decoding.sampling.distribution import SamplingSettings
from inference.decoding.sampling.noise import SharedNoise, Stream
from tests.inference.decoding.rules.toys import START, Toy, consistent
from tests.inference.decoding.test_lossless import requests
from tests.inference.decoding.test_lossless_kinds import drafter_of
from tests.inference.steps import NoHost
from tests.models import random_target

CHAIN = TokenTree.chain(3)
TREE = TokenTree.from_choices([[0], [1], [0, 0], [0, 1], [1, 0]])
DYNAMIC = DynamicShape(6, 3, 2)
ROWS, VOCAB = 64, 30


def cases() -> Iterator[tuple[str, DraftShape]]:
    for name in RULES:
        yield name, CHAIN
        if name not in CHAINS_ONLY:
            yield name, TREE
            yield name, DYNAMIC


CASES = pytest.mark.parametrize(("name", "shape"), list(cases()))


def proposed(
    rule: Rule, shape: DraftShape, settings: SamplingSettings
) -> tuple[Proposal, Tensor, Tensor, SharedNoise]:
    """A proposal of the toy drafter for the rule, the target's logits, positions and the noise."""
    toy, roots = Toy.random(VOCAB, apart=2), torch.full((ROWS,), START)
    noise = SharedNoise(settings, torch.arange(ROWS), VOCAB, rule.drafts, rule.keeps_logits, roots)
    proposal = toy.propose(make_plan(shape), torch.arange(ROWS) % VOCAB, roots, noise)
    positions = (START + proposal.tree.depth).expand(ROWS, -1)
    return proposal, toy.target[proposal.tokens], positions, noise


def test_rules_are_found_by_name() -> None:
    for name, shape in cases():
        rule = get_rule(name, shape)
        assert rule.name == name
    assert set(RULES) == set(decode_config.RULES)
    assert [name for name in RULES if PROMISES[name] == TEXT] == ["match"]
    assert {promise(name, 0.0) for name in RULES} == {TEXT}
    # of a later version: nothing is promised
    assert promise("newer", 0.0) == LOSSY and "LOSSY" in rule_text("newer", 1.0)
    assert get_rule("match", CHAIN).drafts is Stream.TARGET
    assert get_rule("match", CHAIN, share_noise=False).drafts is None
    with pytest.raises(
        UserError, match=r"'blok' is unknown. Did you mean 'block'\? Allowed: block, match"
    ):
        get_rule("blok", CHAIN)


@pytest.mark.parametrize("name", CHAINS_ONLY)
def test_trees_are_refused_by_rules_for_chains(name: str) -> None:
    for shape in (TREE, DYNAMIC):
        with pytest.raises(
            UserError, match=r"needs a chain; given: a tree of 6 nodes. Set decode.shape=chain"
        ):
            check_shape(name, shape)
    check_shape(name, TokenTree.from_choices([[0], [0, 0]]))


@CASES
def test_verdicts_are_consistent_and_ask_the_device_for_nothing(
    name: str, shape: DraftShape
) -> None:
    for settings in (SamplingSettings(0.8, top_k=4, top_p=0.9, min_p=0.01), SamplingSettings(0.0)):
        rule = get_rule(name, shape)
        proposal, logits, positions, noise = proposed(rule, shape, settings)
        with NoHost():
            verdict = rule.judge(proposal, logits, positions, noise)
        deepest = proposal.tree.max_depth
        assert verdict.path.shape == verdict.tokens.shape == (ROWS, deepest + 1)
        assert verdict.tokens.dtype == verdict.path.dtype == verdict.accepted.dtype == torch.int64
        assert verdict.refused.dtype == torch.bool and consistent(verdict, proposal)
        assert 0 < int(verdict.accepted.sum()) < ROWS * deepest


@CASES
def test_at_temperature_0_every_rule_is_match(name: str, shape: DraftShape) -> None:
    rule = get_rule(name, shape)
    proposal, logits, positions, noise = proposed(rule, shape, SamplingSettings(0.0))
    assert proposal.logits is None  # nothing is weighed, so nothing is kept
    found, expected = (r.judge(proposal, logits, positions, noise) for r in (rule, Match()))
    assert torch.equal(found.tokens, expected.tokens) and torch.equal(
        found.accepted, expected.accepted
    )
    assert torch.equal(found.refused, expected.refused) and torch.equal(found.path, expected.path)


@pytest.mark.parametrize(
    ("name", "shape"), [case for case in cases() if case[0] not in ("match", "typical")]
)
def test_certain_drafts_are_matched(name: str, shape: DraftShape) -> None:
    """Drafts without logits: the text is what plain decoding with the same seed says."""
    rule = get_rule(name, shape)
    proposal, logits, positions, noise = proposed(rule, shape, SamplingSettings(0.9))
    proposal.logits = None
    found, expected = (
        r.judge(proposal, logits, positions, noise) for r in (rule, Match(share=False))
    )
    assert torch.equal(found.tokens, expected.tokens) and torch.equal(
        found.accepted, expected.accepted
    )


@pytest.mark.parametrize("with_logits", [False, True])
@pytest.mark.parametrize("name", RULES)
def test_a_root_alone_is_followed_by_one_token(name: str, with_logits: bool) -> None:
    root = TokenTree.chain(0)
    rule, logits = (
        get_rule(name, root),
        torch.randn(ROWS, 1, VOCAB, generator=torch.Generator().manual_seed(0)),
    )
    roots = torch.full((ROWS,), START)
    noise = SharedNoise(
        SamplingSettings(1.0), torch.arange(ROWS), VOCAB, rule.drafts, rule.keeps_logits, roots
    )
    proposal = Proposal(
        torch.zeros(ROWS, 1, dtype=torch.int64), root, logits if with_logits else None
    )
    verdict = rule.judge(proposal, logits, roots[:, None], noise)
    assert verdict.tokens.shape == verdict.path.shape == (ROWS, 1) and not verdict.path.any()
    assert (
        not verdict.accepted.any()
        and not verdict.refused.any()
        and len(verdict.tokens.unique()) > 2
    )


@CASES
def test_rows_that_are_idle_do_no_harm(name: str, shape: DraftShape) -> None:
    """Whatever stands in a row that nobody decodes, its verdict points into the tree and other rows
    do not feel it.
    """
    rule = get_rule(name, shape)
    proposal, logits, positions, noise = proposed(rule, shape, SamplingSettings(1.0))
    expected = rule.judge(proposal, logits, positions, noise)
    logits = logits.clone()
    logits[::3] = torch.nan
    if proposal.logits is not None:
        proposal.logits = proposal.logits.clone()
        proposal.logits[::3] = torch.nan
    verdict = rule.judge(proposal, logits, positions, noise)
    assert int(verdict.path.min()) >= 0 and int(verdict.path.max()) < proposal.tree.num_nodes
    assert (
        int(verdict.accepted.min()) >= 0 and int(verdict.accepted.max()) <= proposal.tree.max_depth
    )
    assert int(verdict.tokens.min()) >= 0 and int(verdict.tokens.max()) < VOCAB
    decoded = torch.arange(ROWS) % 3 != 0
    assert torch.equal(verdict.tokens[decoded], expected.tokens[decoded])
    assert torch.equal(verdict.accepted[decoded], expected.accepted[decoded])


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({"temperature": 0.0}, "match"),
        ({"temperature": 0.7}, "block"),
        ({"temperature": 0.7, "shape": "tree", "choices": ((0,), (1,))}, "traversal"),
        ({"temperature": 0.7, "shape": "dynamic"}, "match"),
        ({"temperature": 0.7, "shape": "dartree"}, "match"),
        ({"temperature": 0.7, "shape": "none"}, "match"),
    ],
)
def test_auto_stands_for_the_rule_of_the_shape_and_temperature(
    settings: dict[str, Any], rule: str
) -> None:
    decode = DecodeConfig(rule="auto", **settings)
    assert decode.acceptance == rule and decode.rule == "auto"
    assert replace(decode, temperature=0.0).acceptance == "match"
    named = replace(decode, rule=rule)
    assert named.acceptance == rule
    target = random_target()
    drafter = None if decode.shape == "none" else drafter_of("medusa", target)
    answers = [
        {
            done.request.index: done.tokens
            for done in Engine(target, drafter, config).run(requests(2))
        }
        for config in (decode, named)
    ]
    assert answers[0] == answers[1]
