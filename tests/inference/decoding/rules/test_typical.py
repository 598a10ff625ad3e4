"""Typical acceptance: its threshold and its walk against a loop, its name as a lossy rule, and its
edges."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from heads.api.drafter import Proposal
from heads.api.errors import UserError
from heads.api.tree import TokenTree
from inference.decoding.rules.typical import Typical
from inference.decoding.sampling.distribution import SamplingSettings, shape_logits
from inference.decoding.sampling.noise import SharedNoise
from tests.inference.decoding.rules.toys import CLEAR, START, Toy, consistent, decode, p_value

TREE = TokenTree.from_choices([[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [1, 0, 0]])


def slow_path(
    tokens: list[int], tree: TokenTree, p: Tensor, epsilon: float, delta: float
) -> list[int]:
    """The longest path of kept drafts, of equally long ones the likeliest; p [N, V]."""
    parents = tree.parents[0].tolist()
    paths: dict[int, tuple[list[int], float]] = {0: ([0], 0.0)}
    for node in range(1, tree.num_nodes):
        own = p[parents[node]].tolist()
        entropy = -sum(value * math.log(value) for value in own if value > 0)
        chance = own[tokens[node]]
        if parents[node] in paths and chance > min(epsilon, delta * math.exp(-entropy)):
            path, score = paths[parents[node]]
            paths[node] = ([*path, node], score + math.log(chance))
    return max(paths.values(), key=lambda found: (len(found[0]), found[1]))[0]


@pytest.mark.parametrize(
    "tree", [TREE, TokenTree.chain(3), TokenTree.chain(0)], ids=["tree", "chain", "root"]
)
@pytest.mark.parametrize(
    "settings", [SamplingSettings(1.0), SamplingSettings(0.7, top_k=3)], ids=str
)
def test_the_path_equals_a_loop(tree: TokenTree, settings: SamplingSettings) -> None:
    generator, rows, vocab = torch.Generator().manual_seed(1), 300, 6
    tokens = torch.randint(vocab, (rows, tree.num_nodes), generator=generator)
    logits = torch.randn(rows, tree.num_nodes, vocab, generator=generator).double() * 2
    noise = SharedNoise(settings, torch.arange(rows), vocab)
    positions = (START + tree.depth).expand(rows, -1)
    for rule in (Typical(), Typical(0.5, 0.9)):
        proposal = Proposal(tokens, tree)
        verdict = rule.judge(proposal, logits, positions, noise)
        assert consistent(verdict, proposal)
        p = shape_logits(logits, settings).softmax(-1)
        picks = noise.target_pick(logits, positions + 1)
        lengths = set()
        for row in range(rows):
            path = slow_path(tokens[row].tolist(), tree, p[row], rule.epsilon, rule.delta)
            assert verdict.path[row, : len(path)].tolist() == path
            assert int(verdict.accepted[row]) == len(path) - 1
            assert int(verdict.tokens[row, len(path) - 1]) == int(picks[row, path[-1]])
            assert bool(verdict.refused[row]) == bool((tree.parents[0, 1:] == path[-1]).any())
            lengths.add(len(path))
        assert tree.num_nodes == 1 or len(lengths) > 1


def test_it_is_lossy_and_says_so() -> None:
    toy, settings = Toy.random(), SamplingSettings(1.0)
    assert Typical.__doc__ is not None and "LOSSY" in Typical.__doc__
    found = decode(toy, Typical(), TREE, settings, rows=5_000)
    assert p_value(found.text, toy.law(settings, 3)) < CLEAR


def test_what_the_target_cannot_say_is_never_kept() -> None:
    toy, settings = Toy.random(), SamplingSettings(1.0, top_k=1)
    found = decode(toy, Typical(), TREE, settings, rows=100)
    # one text is left, and it is the target's
    assert p_value(found.text, toy.law(settings, 3)) == 1.0


@pytest.mark.parametrize(("epsilon", "delta"), [(0.0, 0.3), (0.09, 0.0), (1.5, 0.3), (0.09, -1.0)])
def test_thresholds_are_checked(epsilon: float, delta: float) -> None:
    with pytest.raises(UserError, match="above 0 and at most 1"):
        Typical(epsilon, delta)
