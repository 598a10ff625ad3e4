"""Recursive rejection on trees: the law of its texts exactly and over several passes, the walk
against a loop, and its edges.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise, permutations

import pytest
import torch
from torch import Tensor

from heads.api.drafter import Proposal
from heads.api.tree import DynamicShape, Ranking, TokenTree
from heads.nn.drafting.plan import make_plan
from inference.decoding.rules import specinfer
from inference.decoding.rules.match import Match
from inference.decoding.rules.rejection import Rejection
from inference.decoding.rules.specinfer import SpecInfer, children_of, tries
from inference.decoding.sampling.distribution import SamplingSettings, draft_logits, shape_logits
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


Weigh = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


def with_replacement(
    p: Tensor, scores: Tensor, tokens: Tensor, there: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """`tries` as if every child had been drawn from the whole of q: wrong for children that
    differ."""
    found = [tries(p, scores, tokens[:, :1], there[:, :1])]
    for k in range(1, tokens.shape[1]):
        found.append(tries(found[-1][2], scores, tokens[:, k : k + 1], there[:, k : k + 1]))
    return torch.cat([f[0] for f in found], 1), torch.cat([f[1] for f in found], 1), found[-1][2]


# One node, by enumeration


def node_law(
    toy: Toy, settings: SamplingSettings, count: int, weigh: Weigh = tries
) -> tuple[Tensor, Tensor, float]:
    """One node with `count` children, in float64: the target's p [V], the law [V] of the token
    behind it, and how likely a child is kept. Every ordered choice of children is weighed as a row
    of its own.
    """
    vocab = len(toy.target)
    p = shape_logits(toy.target[:1].double(), settings).softmax(-1)
    scores = draft_logits(toy.drafter[:1].double(), settings, toy.token_ids, vocab)
    q = scores.softmax(-1)[0]
    drafted = range(vocab) if toy.token_ids is None else sorted(toy.token_ids.tolist())
    children = torch.tensor(list(permutations(drafted, count)))
    q_drawn = q[children]
    chance = (q_drawn / (1 - q_drawn.cumsum(1) + q_drawn)).prod(
        1
    )  # drawn one after the other, without replacement
    assert float(chance.sum()) == pytest.approx(1, abs=1e-9)
    there = torch.ones_like(children, dtype=torch.bool)
    rows = len(children)
    p_child, q_child, rest = weigh(p.expand(rows, -1), scores.expand(rows, -1), children, there)
    assert p_child.dtype == q_child.dtype == rest.dtype == torch.float64
    keep = (p_child / q_child).clamp(max=1)
    reached = torch.nn.functional.pad((1 - keep).cumprod(1), (1, 0), value=1.0)
    law = torch.zeros(vocab, dtype=torch.float64)
    law.index_add_(0, children.flatten(), (chance[:, None] * reached[:, :-1] * keep).flatten())
    kept = float(law.sum())
    law += (chance * reached[:, -1]) @ (rest / rest.sum(-1, keepdim=True))
    return p[0], law, kept


@pytest.mark.parametrize("drafted", [None, 4], ids=["whole", "reduced"])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_law_of_a_node_is_the_targets_by_enumeration(
    count: int, settings: SamplingSettings, drafted: int | None
) -> None:
    for seed in range(3):
        p, law, _ = node_law(Toy.random(drafted=drafted, seed=seed, apart=1.5), settings, count)
        assert torch.allclose(law, p, atol=1e-13)


def test_weighing_without_removing_what_was_tried_breaks_the_law() -> None:
    toy = Toy.random(seed=1, apart=2.5)
    p, law, _ = node_law(toy, SamplingSettings(1.0), 3, with_replacement)
    assert float((law - p).abs().sum()) > 0.01
    p, law, _ = node_law(toy, SamplingSettings(1.0), 3)
    assert float((law - p).abs().sum()) < 1e-13


def test_more_children_keep_more_and_one_child_is_rejection_sampling() -> None:
    settings = SamplingSettings(0.7)
    for seed in range(10):
        toy = Toy.random(seed=seed, apart=1.5)
        p, q = (values[0].double().div(0.7).softmax(-1) for values in (toy.target, toy.drafter))
        kept = [node_law(toy, settings, count)[2] for count in (1, 2, 3, 4)]
        assert kept[0] == pytest.approx(float(torch.minimum(p, q).sum()), abs=1e-12)
        assert all(more >= less - 1e-12 for less, more in pairwise(kept))
        assert kept[3] > kept[0] + 0.01


# Texts


@pytest.mark.parametrize("drafted", [None, 3], ids=["whole", "reduced"])
@pytest.mark.parametrize("settings", SETTINGS[:3], ids=str)
def test_texts_of_several_passes_follow_the_target(
    settings: SamplingSettings, drafted: int | None
) -> None:
    check_texts(SpecInfer(TREE), TREE, settings, drafted, apart=1.5)


@pytest.mark.parametrize("noise", [CoinIsDraft, ResidualIsDraft])
def test_reused_noise_is_noticed(noise: type[SharedNoise]) -> None:
    check_reused_noise(SpecInfer(TREE), TREE, noise, apart=2.5)


def test_wrong_weights_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    toy, settings = Toy.random(apart=1.5), SamplingSettings(0.7)
    law = toy.law(settings, 3)

    def untempered(proposal: Proposal) -> None:
        assert proposal.logits is not None
        proposal.logits = proposal.logits * settings.temperature

    assert (
        p_value(decode(toy, SpecInfer(TREE), TREE, settings, tamper=untempered).text, law) < CLEAR
    )
    monkeypatch.setattr(specinfer, "tries", with_replacement)
    assert p_value(decode(toy, SpecInfer(TREE), TREE, settings).text, law) < CLEAR


def test_it_keeps_more_than_rejection_sampling() -> None:
    toy, settings = Toy.random(apart=1.5), SamplingSettings(1.0)
    chain = TokenTree.chain(3)
    alone = decode(toy, Rejection(), chain, settings, tokens=1).accepted[0]
    assert decode(toy, SpecInfer(TREE), TREE, settings, tokens=1).accepted[0] > alone + 0.1


def test_on_a_chain_it_is_rejection_sampling() -> None:
    toy, settings, chain = Toy.random(), SamplingSettings(0.7, top_k=4), TokenTree.chain(3)
    one = decode(toy, Rejection(), chain, settings, rows=4_000)
    other = decode(toy, SpecInfer(chain), chain, settings, rows=4_000)
    assert torch.equal(one.text, other.text)
    assert one.accepted == other.accepted and one.refused == other.refused


# Dynamic trees


@pytest.mark.parametrize("ranking", list(Ranking))
def test_texts_of_dynamic_trees_follow_the_target(ranking: Ranking) -> None:
    toy, settings = Toy.random(apart=1.5), SamplingSettings(0.7)
    shape = DynamicShape(6, 3, 2, ranking)
    rule = SpecInfer(shape)
    assert rule.drafts is None and not rule.keeps_logits
    found = decode(toy, rule, shape, settings, rows=20_000)
    assert p_value(found.text, toy.law(settings, 3)) > 1e-4
    assert torch.equal(
        found.text, decode(toy, Match(share=False), shape, settings, rows=20_000).text
    )


@pytest.mark.parametrize(("ranking", "nodes"), [(Ranking.PROBABILITY, 3), (Ranking.PERTURBED, 4)])
def test_weighing_dynamic_trees_by_q_would_be_wrong(ranking: Ranking, nodes: int) -> None:
    """Why they are not: sampled drafts decide by their scores which siblings and children are in
    the tree."""
    toy, settings, rows = Toy.random(vocab=3, seed=1, apart=2), SamplingSettings(1.0), 120_000
    shape = DynamicShape(nodes, 2, 2, ranking)
    seeds, roots = torch.arange(rows), torch.full((rows,), START)
    noise = SharedNoise(settings, seeds, 3, Stream.DRAFT, True, roots)
    proposal = toy.propose(make_plan(shape), torch.zeros_like(seeds), roots, noise)
    assert proposal.logits is not None
    text = torch.zeros(rows, 2, dtype=torch.int64)
    topologies, which = torch.unique(proposal.tree.parents, dim=0, return_inverse=True)
    assert len(topologies) > 1
    for number, parents in enumerate(topologies):  # each as if it were a static tree
        mine = which == number
        static = TokenTree.from_parents(parents[None], 2)
        part = Proposal(proposal.tokens[mine], static, proposal.logits[mine])
        positions = (START + static.depth).expand(len(part.tokens), -1)
        some = SharedNoise(settings, seeds[mine], 3, Stream.DRAFT, True, roots[mine])
        verdict = SpecInfer(static).judge(part, toy.target[part.tokens], positions, some)
        text[mine] = verdict.tokens[:, :2]
        alone = verdict.accepted == 0  # one token only: the next one is the target's
        second = some.target_pick(toy.target[verdict.tokens[:, :1]], positions[:, :1] + 2)[:, 0]
        text[mine, 1] = torch.where(alone, second, verdict.tokens[:, 1])
    assert p_value(text, toy.law(settings, 2)) < CLEAR


# The walk, and edges


def slow_walk(
    tokens: list[int], parents: list[int], p: Tensor, q: Tensor, coins: Tensor
) -> tuple[list[int], bool, Tensor]:
    """Path, whether drafts were refused behind it, and what the next token is drawn from [V]; p, q
    [N, V], coins [N, K].
    """
    path = [0]
    while True:
        mine, own = p[path[-1]].clone(), q[path[-1]].clone()
        children = [i for i in range(1, len(tokens)) if parents[i] == path[-1]]
        for rank, child in enumerate(children):
            token = tokens[child]
            if coins[path[-1], rank] < mine[token] / own[token]:
                path.append(child)
                break
            mine = (mine - own).clamp(min=0)
            mine /= mine.sum()
            own[token] = 0
            own /= own.sum()
        else:
            return path, bool(children), mine


def test_the_walk_equals_a_loop_on_random_trees() -> None:
    settings, vocab, rows = SamplingSettings(0.8, top_k=6), 9, 40
    generator = torch.Generator().manual_seed(0)
    lengths = set()
    for nodes in (1, 2, 5, 9, 9, 14, 14):
        tree, tokens, parents = random_tree(nodes, vocab, rows, generator)
        logits, own = (
            torch.randn(rows, nodes, vocab, generator=generator).double() for _ in range(2)
        )
        noise = SharedNoise(
            settings, torch.arange(rows), vocab, Stream.DRAFT, True, torch.full((rows,), START)
        )
        positions = (START + tree.depth).expand(rows, -1)
        proposal = Proposal(tokens, tree, own)
        verdict = SpecInfer(tree).judge(proposal, logits, positions, noise)
        assert consistent(verdict, proposal)
        p, q = shape_logits(logits, settings).softmax(-1), (own / 0.8).softmax(-1)
        coins, gumbel = (
            noise.uniforms(positions + 1, nodes),
            noise.gumbel(positions + 1, stream=Stream.RESIDUAL),
        )
        for row in range(rows):
            path, refused, rest = slow_walk(
                tokens[row].tolist(), parents, p[row], q[row], coins[row]
            )
            assert verdict.path[row].tolist() == path + [0] * (tree.max_depth + 1 - len(path))
            assert (
                int(verdict.accepted[row]) == len(path) - 1
                and bool(verdict.refused[row]) == refused
            )
            assert int(verdict.tokens[row, len(path) - 1]) == int(
                (rest.log() + gumbel[row, path[-1]]).argmax()
            )
            lengths.add(len(path))
    assert {1, 2, 3} <= lengths


ONE_PASS = OnePass(SpecInfer(TREE), TREE)


def test_what_the_target_cannot_say_is_never_kept() -> None:
    ONE_PASS.check_the_impossible_is_never_kept()


def test_a_perfect_draft_is_always_kept() -> None:
    ONE_PASS.check_a_perfect_draft_is_always_kept([1, 4, 7])


def test_a_repeated_sibling_changes_nothing() -> None:
    toy = Toy.random(apart=1.5)
    p, q = toy.target[:1].double().softmax(-1), toy.drafter[:1].double()
    there = torch.ones(1, 3, dtype=torch.bool)
    p_child, q_child, rest = tries(p, q, torch.tensor([[1, 1, 3]]), there)
    p_alone, q_alone, rest_alone = tries(p, q, torch.tensor([[1, 3]]), there[:, :2])
    assert p_child[0].tolist() == [p_alone[0, 0], 0, p_alone[0, 1]]
    assert q_child[0].tolist() == [q_alone[0, 0], 1, q_alone[0, 1]] and torch.equal(
        rest, rest_alone
    )


def test_a_drafter_that_is_almost_sure_still_weighs_its_second_draft() -> None:
    """q is 1 at the first child to float32's precision, and beyond its range at the second."""
    p = torch.tensor([[0.2, 0.5, 0.3]])
    scores = torch.tensor([[150.0, 0.0, -1.0]])
    p_child, q_child, rest = tries(
        p, scores, torch.tensor([[0, 1]]), torch.ones(1, 2, dtype=torch.bool)
    )
    second = torch.tensor([0.0, -1.0]).softmax(-1)
    assert torch.allclose(p_child, torch.tensor([[0.2, 0.625]])) and torch.allclose(
        q_child[0, 1], second[0]
    )
    assert torch.allclose(rest, torch.tensor([[0.0, 0.0, 1.0]]))
    # nothing left to draw from: the child is no draw from q and is passed over
    p_child, _, rest = tries(
        p,
        torch.tensor([[0.0, -torch.inf, -torch.inf]]),
        torch.tensor([[0, 1]]),
        torch.ones(1, 2, dtype=torch.bool),
    )
    assert p_child[0, 1] == 0 and torch.allclose(rest, torch.tensor([[0.0, 0.625, 0.375]]))


def test_children_are_listed_in_the_order_they_were_drawn() -> None:
    table, widths = children_of(TREE)
    assert widths == (3, 2, 2)
    assert (
        table[0].tolist() == [1, 2, 3]
        and table[1].tolist() == [4, 5, 0]
        and table[8].tolist() == [0, 0, 0]
    )
    assert children_of(TokenTree.chain(0))[1] == () and children_of(TokenTree.chain(2))[1] == (1, 1)


def test_noise_need_not_be_keyed_by_the_pass() -> None:
    """Drafts behind the kept path have no say in it; the keys are there for block verification."""
    toy, settings = Toy.random(apart=1.5), SamplingSettings(1.0)
    found = decode(toy, SpecInfer(TREE), TREE, settings, noise_type=UnkeyedByPass)
    assert p_value(found.text, toy.law(settings, 3)) > 1e-4
