"""Block verification of trees: the law of its texts exactly and over several passes, the walk
against a loop, and its edges."""

from __future__ import annotations

from itertools import permutations, product
from typing import Any

import pytest
import torch
from torch import Tensor

from heads.api.drafter import Proposal
from heads.api.tree import DynamicShape, Ranking, TokenTree
from heads.nn.drafting.growth import fill
from heads.nn.drafting.state import Rooted
from inference.decoding.rules.block import BlockVerification
from inference.decoding.rules.match import Match
from inference.decoding.rules.specinfer import SpecInfer
from inference.decoding.rules.traversal import Traversal
from inference.decoding.sampling.distribution import SamplingSettings, shape_logits
from inference.decoding.sampling.noise import SharedNoise, Stream
from tests.inference.decoding.rules.test_rejection import SETTINGS
from tests.inference.decoding.rules.toys import (
    CLEAR,
    START,
    CoinIsDraft,
    OnePass,
    ResidualIsDraft,
    Toy,
    UnkeyedByPass,
    check_reused_noise,
    check_texts,
    consistent,
    decode,
    p_value,
    random_tree,
)

TREE = TokenTree.from_choices([[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 0, 1]])


class NodesAlike(SharedNoise):
    """Nodes of one depth draw their children with the same noise."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments[:6], False)


# The slow walk: one row, plain Python


def judged(
    node: int,
    share: float,
    tokens: list[int],
    children: list[list[int]],
    p: Tensor,
    q: Tensor,
    kept: list[tuple[int, float, Tensor]],
) -> None:
    """Append (node, its share, its p) of `node` and of everything below it, in the order in which
    they are asked. p, q [N, V]."""
    mine, own = p[node].clone(), q[node].clone()
    for child in children[node]:
        token = tokens[child]
        granted = min(1.0, share * float(mine[token]) / float(own[token]))
        judged(child, granted, tokens, children, p, q, kept)
        left = (share * mine - own).clamp(min=0)
        rest = float(left.sum())
        share = rest / (rest + 1 - share) if rest + 1 - share > 0 else 1.0
        mine = left / rest if rest > 0 else mine
        own[token] = 0
        own = own / own.sum() if own.sum() > 0 else own
    kept.append((node, share, mine))


def children_of(tree: TokenTree) -> list[list[int]]:
    parents = tree.parents[0].tolist()
    return [[n for n in range(1, len(parents)) if parents[n] == m] for m in range(len(parents))]


def exact_law(toy: Toy, tree: TokenTree, tokens: int) -> Tensor:
    """The law [V ** n] of n tokens behind token 0, by enumeration of all drafts of one pass."""
    vocab, children = len(toy.target), children_of(tree)
    target, drafter = (table.double().softmax(-1) for table in (toy.target, toy.drafter))
    law = torch.zeros((vocab,) * tokens, dtype=torch.float64)
    inner = [node for node, below in enumerate(children) if below]
    orders = [list(permutations(range(vocab), len(children[node]))) for node in inner]
    for drawn in product(*orders):
        drafted, chance = [0] * tree.num_nodes, 1.0
        for node, order in zip(inner, drawn, strict=True):  # parents come first
            left = 1.0
            for child, token in zip(children[node], order, strict=True):
                drafted[child] = token
                own = float(drafter[drafted[node], token])
                chance, left = chance * own / left, left - own
        asked: list[tuple[int, float, Tensor]] = []
        judged(0, 1.0, drafted, children, target[drafted], drafter[drafted], asked)
        for node, share, rest in asked:
            path, at = [], node
            while at:
                path.insert(0, drafted[at])
                at = int(tree.parents[0, at])
            for token in range(vocab):
                add(law, target, [*path, token], chance * share * float(rest[token]))
            chance *= 1 - share
        assert chance == pytest.approx(0, abs=1e-12)  # the root is always kept
    return law.flatten()


def add(law: Tensor, target: Tensor, text: list[int], chance: float) -> None:
    """Add a text's probability to the law of its first tokens, continued by the target."""
    if len(text) >= law.ndim:
        law[tuple(text[: law.ndim])] += chance
        return
    for token in range(len(target)):
        add(law, target, [*text, token], chance * float(target[text[-1], token]))


@pytest.mark.parametrize(
    "choices",
    [
        [[0], [1]],
        [[0], [0, 0]],
        [[0], [1], [0, 0], [0, 1]],
        [[0], [1], [0, 0], [1, 0]],
        [[0], [1], [2], [1, 0], [1, 1], [2, 0]],
    ],
    ids=str,
)
def test_the_law_of_a_pass_is_the_targets_by_enumeration(choices: list[list[int]]) -> None:
    tree = TokenTree.from_choices(choices)
    for seed in range(2):
        toy = Toy.random(vocab=3, seed=seed, apart=1.5)
        law = toy.law(SamplingSettings(1.0), 3)
        assert torch.allclose(exact_law(toy, tree, 3), law, atol=1e-12)


def test_the_walk_equals_a_loop_on_random_trees() -> None:
    settings, vocab, rows = SamplingSettings(0.8, top_k=6), 9, 40
    generator = torch.Generator().manual_seed(0)
    lengths = set()
    for nodes in (1, 2, 5, 9, 9, 14, 14):
        tree, tokens, parents = random_tree(nodes, vocab, rows, generator)
        depth = tree.depth[0].tolist()
        logits, own = (
            torch.randn(rows, nodes, vocab, generator=generator).double() for _ in range(2)
        )
        seeds, roots = torch.arange(rows), torch.full((rows,), START)
        noise = SharedNoise(settings, seeds, vocab, Stream.DRAFT, True, roots, True)
        positions = (START + tree.depth).expand(rows, -1)
        proposal = Proposal(tokens, tree, own)
        verdict = Traversal(tree).judge(proposal, logits, positions, noise)
        assert consistent(verdict, proposal)
        p, q = shape_logits(logits, settings).softmax(-1), (own / 0.8).softmax(-1)
        coins = noise.uniforms(positions, nodes)
        gumbel = noise.gumbel(positions + 1, stream=Stream.RESIDUAL)
        column = [depth[:node].count(depth[node]) for node in range(nodes)]
        below = children_of(tree)
        for row in range(rows):
            asked: list[tuple[int, float, Tensor]] = []
            judged(0, 1.0, tokens[row].tolist(), below, p[row], q[row], asked)
            node, rest = next(
                (node, rest)
                for node, share, rest in asked
                if node == 0 or coins[row, node, column[node]] < share
            )
            path, at = [node], node
            while at:
                at = parents[at]
                path.insert(0, at)
            assert verdict.path[row].tolist() == path + [0] * (tree.max_depth + 1 - len(path))
            assert int(verdict.accepted[row]) == depth[node]
            assert bool(verdict.refused[row]) == bool(below[node])
            bonus = int((rest.log() + gumbel[row, node]).argmax())
            assert int(verdict.tokens[row, depth[node]]) == bonus
            lengths.add(len(path))
    assert {1, 2, 3} <= lengths


# Texts


@pytest.mark.parametrize("drafted", [None, 3], ids=["whole", "reduced"])
@pytest.mark.parametrize("settings", SETTINGS[:3], ids=str)
def test_texts_of_several_passes_follow_the_target(
    settings: SamplingSettings, drafted: int | None
) -> None:
    check_texts(Traversal(TREE), TREE, settings, drafted, apart=1.5)


@pytest.mark.parametrize("noise", [CoinIsDraft, ResidualIsDraft])
def test_reused_noise_is_noticed(noise: type[SharedNoise]) -> None:
    check_reused_noise(Traversal(TREE), TREE, noise, apart=2.5)


def test_nodes_that_draw_alike_are_noticed() -> None:
    toy, settings = Toy.random(vocab=8, seed=1, apart=2.5), SamplingSettings(1.0)
    law, more = toy.law(settings, 2), {"tokens": 2, "rows": 100_000}
    assert p_value(decode(toy, Traversal(TREE), TREE, settings, **more).text, law) > 1e-4
    found = decode(toy, Traversal(TREE), TREE, settings, **more, noise_type=NodesAlike)
    assert p_value(found.text, law) < CLEAR


def test_noise_that_does_not_know_the_pass_is_noticed() -> None:
    toy, settings = Toy.random(vocab=8, seed=1, apart=2.5), SamplingSettings(1.0)
    found = decode(toy, Traversal(TREE), TREE, settings, noise_type=UnkeyedByPass, rows=120_000)
    assert p_value(found.text, toy.law(settings, 3)) < CLEAR


class Alike(Toy):
    """A drafter whose depths do not depend on the tokens before, like Medusa's heads."""

    def propose(
        self, plan: Any, root: Tensor, root_position: Tensor, noise: SharedNoise
    ) -> Proposal:
        rows = self.drafter[: plan.max_depth].expand(root.shape[0], -1, -1)
        return fill(Rooted(root, root_position, plan), rows, noise, self.token_ids)


def test_drafters_of_independent_depths_draw_for_every_node() -> None:
    toy, settings = Alike.random(vocab=5, seed=1, apart=2.0), SamplingSettings(1.0)
    law = toy.law(settings, 3)
    assert p_value(decode(toy, Traversal(TREE), TREE, settings).text, law) > 1e-4
    found = decode(toy, Traversal(TREE), TREE, settings, noise_type=NodesAlike)
    assert p_value(found.text, law) < CLEAR


def test_it_keeps_more_than_rejection_from_the_root() -> None:
    for seed in range(3):
        toy, settings = Toy.random(seed=seed, apart=1.5), SamplingSettings(1.0)
        kept = [
            decode(toy, rule(TREE), TREE, settings, tokens=1).accepted[0]
            for rule in (SpecInfer, Traversal)
        ]
        assert kept[1] > kept[0] + 0.005


def test_on_a_chain_it_is_block_verification() -> None:
    toy, settings, chain = Toy.random(), SamplingSettings(0.7, top_k=4), TokenTree.chain(3)
    one = decode(toy, BlockVerification(), chain, settings, rows=4_000)
    other = decode(toy, Traversal(chain), chain, settings, rows=4_000)
    assert torch.equal(one.text, other.text)
    assert one.accepted == other.accepted and one.refused == other.refused


# Dynamic trees and edges


def test_dynamic_trees_are_matched() -> None:
    toy, settings = Toy.random(apart=1.5), SamplingSettings(0.7)
    shape = DynamicShape(6, 3, 2, Ranking.PROBABILITY)
    rule = Traversal(shape)
    assert rule.drafts is None and not rule.keeps_logits
    found = decode(toy, rule, shape, settings, rows=5_000)
    expected = decode(toy, Match(share=False), shape, settings, rows=5_000)
    assert torch.equal(found.text, expected.text)


ONE_PASS = OnePass(Traversal(TREE), TREE)


def test_what_the_target_cannot_say_is_never_kept() -> None:
    ONE_PASS.check_the_impossible_is_never_kept()


def test_a_perfect_draft_is_always_kept() -> None:
    ONE_PASS.check_a_perfect_draft_is_always_kept([1, 4, 7])
