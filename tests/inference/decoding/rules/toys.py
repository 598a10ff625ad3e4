"""A target and a drafter that are two tables (next token given the last one), decoded with the real
drafting, noise and rules.

The law of their texts can be written down, so that what comes out over several passes can be held
against it.

Legend: B rows, N nodes, D deepest level, V vocabulary, V' its drafted part, n tokens of text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from heads.api.drafter import Proposal
from heads.api.tree import DraftShape, TokenTree
from heads.nn.drafting.growth import grow
from heads.nn.drafting.plan import make_plan
from heads.nn.drafting.state import Rooted
from inference.decoding.rules.base import Rule, Verdict
from inference.decoding.rules.weights import Chain
from inference.decoding.sampling.distribution import SamplingSettings, shape_logits
from inference.decoding.sampling.noise import SharedNoise, Stream, stream_seeds

START = 5  # position of the first root
CLEAR = 1e-9
"""Wrong laws must be at most this likely; right ones must be above 1e-4, and their seeds are
fixed."""


@dataclass
class Toy:
    """target [V, V] logits of the next token given the last one; drafter [V, V'] likewise;
    token_ids [V'] or None.
    """

    target: Tensor
    drafter: Tensor
    token_ids: Tensor | None = None

    @classmethod
    def random(
        cls, vocab: int = 5, drafted: int | None = None, seed: int = 0, apart: float = 1.0
    ) -> Toy:
        """Random tables; apart: how far the drafter's logits are from the target's."""
        generator = torch.Generator().manual_seed(seed)
        target = torch.randn(vocab, vocab, generator=generator) * 1.2
        drafter = target + torch.randn(vocab, vocab, generator=generator) * apart
        if drafted is None:
            return cls(target, drafter)
        ids = torch.randperm(vocab, generator=generator)[:drafted]
        return cls(target, drafter[:, ids], ids)

    def propose(
        self, plan: Any, root: Tensor, root_position: Tensor, noise: SharedNoise
    ) -> Proposal:
        """Draft behind root [B] with the code that real drafters use."""

        def step(place: Any, tokens: Tensor, carry: Tensor) -> tuple[Tensor, Tensor]:
            return self.drafter[tokens], carry.expand(-1, tokens.shape[1], -1)

        carry = torch.zeros(root.shape[0], 1, 1)
        state, logits = Rooted(root, root_position, plan), self.drafter[root][:, None]
        return grow(state, logits, carry, step, noise, self.token_ids)

    def law(self, settings: SamplingSettings, tokens: int) -> Tensor:
        """Probability of every text of n tokens behind token 0, float64 [V ** n]."""
        p = shape_logits(self.target.double(), settings).softmax(-1)
        joint = p[0]
        for _ in range(tokens - 1):
            joint = (joint.reshape(-1, len(p))[:, :, None] * p).flatten()
        return joint


@dataclass
class Decoded:
    """text [B, n]; accepted, tested [passes] mean drafts kept per row, and the share of rows that
    refused one.
    """

    text: Tensor
    accepted: list[float]
    refused: list[float]


def decode(
    toy: Toy,
    rule: Rule,
    shape: DraftShape,
    settings: SamplingSettings,
    *,
    rows: int = 40_000,
    tokens: int = 3,
    seed: int = 1,
    noise_type: type[SharedNoise] = SharedNoise,
    tamper: Callable[[Proposal], None] | None = None,
) -> Decoded:
    """Decode n tokens behind token 0 in every row, pass by pass. tamper: spoils proposals for
    negative controls.
    """
    plan, width = make_plan(shape), tokens + shape.max_depth + 1
    lengths, root = torch.full((rows,), START), torch.zeros(rows, dtype=torch.int64)
    seeds = torch.arange(rows) * 3 + (seed << 20)
    kept = rule.keeps_logits, lengths, rule.separate
    noise = noise_type(settings, seeds, len(toy.target), rule.drafts, *kept)
    text, found = torch.zeros(rows, width, dtype=torch.int64), Decoded(torch.empty(0), [], [])
    for _ in range(tokens):
        proposal = toy.propose(plan, root, lengths, noise)
        if tamper is not None:
            tamper(proposal)
        verdict = rule.judge(
            proposal, toy.target[proposal.tokens], lengths[:, None] + proposal.tree.depth, noise
        )
        place = torch.arange(verdict.tokens.shape[1])
        # what was not committed is overwritten by the next pass; rows that are done run on into the
        # last slot
        slots = (lengths[:, None] - START + place).clamp(max=width - 1)
        text.scatter_(1, slots, verdict.tokens)
        found.accepted.append(float(verdict.accepted.double().mean()))
        found.refused.append(float(verdict.refused.double().mean()))
        root = verdict.tokens.gather(1, verdict.accepted[:, None])[:, 0]
        lengths += verdict.accepted + 1
    found.text = text[:, :tokens]
    return found


def p_value(text: Tensor, law: Tensor) -> float:
    """How likely counts as far from `law` [V ** n] as those of text [B, n] are (chi-square; rare
    texts are counted as one).
    """
    vocab = round(len(law) ** (1 / text.shape[1]))
    index = torch.zeros_like(text[:, 0])
    for column in text.unbind(1):
        index = index * vocab + column
    counts, expected = torch.bincount(index, minlength=len(law)).double(), law * len(text)
    if counts[law == 0].any():
        return 0.0
    often = expected >= 8
    counts = torch.cat([counts[often], counts[~often].sum()[None]])
    expected = torch.cat([expected[often], expected[~often].sum()[None]])
    used = expected > 0
    chi = (((counts - expected) ** 2)[used] / expected[used]).sum()
    return float(torch.special.gammaincc((used.sum() - 1).clamp(min=1).double() / 2, chi / 2))


class UnkeyedByPass(SharedNoise):
    """Draws the same noise at a position in every pass."""

    def stream(self, stream: Any) -> Tensor:
        return stream_seeds(self.seeds, stream)


def consistent(verdict: Verdict, proposal: Proposal) -> bool:
    """Whether path and tokens agree with the tree and with each other."""
    path, accepted = verdict.path, verdict.accepted[:, None]
    parents = proposal.tree.parents.expand(path.shape[0], -1)
    kept = torch.arange(1, path.shape[1]) <= accepted
    linked = parents.gather(1, path[:, 1:]) == path[:, :-1]
    same = proposal.tokens.gather(1, path[:, 1:]) == verdict.tokens[:, :-1]
    return bool(((linked & same) | ~kept).all()) and not bool(path[:, 0].any())


class CoinIsDraft(SharedNoise):
    """Tosses coins with the noise that drafts were drawn with."""

    def uniforms(self, positions: Tensor, columns: int, stream: Stream = Stream.COIN) -> Tensor:
        return super().uniforms(positions, columns, Stream.DRAFT)


class ResidualIsDraft(SharedNoise):
    """Draws what replaces a refused draft with the noise that the draft was drawn with."""

    def draw(self, scores: Tensor, positions: Tensor, stream: Stream) -> Tensor:
        return super().draw(scores, positions, Stream.DRAFT)


def coins_of(value: float) -> type[SharedNoise]:
    """Noise whose coins all show `value`."""

    class Fixed(SharedNoise):
        def uniforms(self, positions: Tensor, columns: int, stream: Stream = Stream.COIN) -> Tensor:
            return torch.full((*positions.shape, columns), value, dtype=torch.float64)

    return Fixed


HIGHEST = 1 - 2.0**-33  # the largest coin there is
JUST_BELOW = -1e-30  # no coin: against it, `<` decides about p = 0 as `<=` would against 0


def random_tree(
    nodes: int, vocab: int, rows: int, generator: torch.Generator
) -> tuple[TokenTree, Tensor, list[int]]:
    """A random static tree, tokens [rows, nodes] whose siblings differ, and the nodes' parents."""
    parents = [0] + [
        int(torch.randint(max(0, i - 4), i, (1,), generator=generator)) for i in range(1, nodes)
    ]
    depth = [0] * nodes
    for i in range(1, nodes):
        depth[i] = depth[parents[i]] + 1
    tokens = torch.zeros(rows, nodes, dtype=torch.int64)
    for row in range(rows):
        orders = [torch.randperm(vocab, generator=generator).tolist() for _ in range(nodes)]
        for i in range(1, nodes):
            tokens[row, i] = orders[parents[i]].pop()
    return TokenTree.from_parents(torch.tensor([parents]), max(depth)), tokens, parents


def weighing(settings: SamplingSettings, toy: Toy) -> SharedNoise:
    """Noise that is asked for probabilities alone."""
    return SharedNoise(settings, torch.zeros(1, dtype=torch.int64), toy.target.shape[-1])


def all_chains(toy: Toy, depth: int, settings: SamplingSettings) -> tuple[Chain, Tensor]:
    """Every chain of drafts behind token 0, weighed in float64, and how likely it is drafted
    [R]."""
    vocab = len(toy.target)
    drafted = torch.cartesian_prod(*[torch.arange(vocab)] * depth).reshape(-1, depth)
    tokens = torch.cat([torch.zeros(len(drafted), 1, dtype=torch.int64), drafted], 1)
    proposal = Proposal(tokens, TokenTree.chain(depth), toy.drafter.double()[tokens], toy.token_ids)
    chain = Chain.of(proposal, toy.target.double()[tokens], weighing(settings, toy))
    assert chain.p.dtype == chain.q.dtype == torch.float64
    return chain, chain.q_drafted.prod(1)


def exact_law(
    toy: Toy, settings: SamplingSettings, chain: Chain, weight: Tensor, stops: Tensor, rests: Tensor
) -> Tensor:
    """The law [V ** N] of the first N tokens, when a rule keeps i drafts of chain r with
    probability stops [R, N] and draws the next token from rests [R, N, V]; what comes after that
    follows the target.
    """
    p = shape_logits(toy.target.double(), settings).softmax(-1)
    vocab, nodes = len(p), stops.shape[1]
    law = torch.zeros([vocab] * nodes, dtype=torch.float64)
    tails = [torch.ones(vocab, 1, dtype=torch.float64)]
    for _ in range(nodes - 1):
        tails.append((p[:, :, None] * tails[-1]).flatten(1))
    for row, drafted in enumerate(chain.drafted.tolist()):
        for kept in range(nodes):
            following = rests[row, kept] / rests[row, kept].sum().clamp(min=1e-300)
            texts = following[:, None] * tails[nodes - 1 - kept]
            law[tuple(drafted[:kept])] += (weight[row] * stops[row, kept] * texts).reshape(
                [vocab] * (nodes - kept)
            )
    return law.flatten()


def check_texts(
    rule: Rule, shape: DraftShape, settings: SamplingSettings, drafted: int | None, apart: float
) -> None:
    """Texts of several passes follow the target; drafts are kept and refused. drafted, apart: see
    `Toy.random`."""
    toy = Toy.random(drafted=drafted, apart=apart)
    found = decode(toy, rule, shape, settings)
    assert p_value(found.text, toy.law(settings, 3)) > 1e-4
    assert 0.05 < found.refused[0] < 0.95


def check_reused_noise(
    rule: Rule, shape: DraftShape, noise_type: type[SharedNoise], apart: float
) -> None:
    """Texts of two tokens follow the target, and do not with `noise_type`. apart: see
    `Toy.random`."""
    toy, settings = Toy.random(vocab=8, seed=1, apart=apart), SamplingSettings(1.0)
    law = toy.law(settings, 2)
    assert p_value(decode(toy, rule, shape, settings, tokens=2).text, law) > 1e-4
    found = decode(toy, rule, shape, settings, tokens=2, noise_type=noise_type)
    assert p_value(found.text, law) < CLEAR


@dataclass
class OnePass:
    """One pass of a rule over 2,000 rows of drafts of a tree. seeds [2000] of the noise; drafted
    [2000, N]: the drafts, None for those of the toy.
    """

    rule: Rule
    tree: TokenTree
    seeds: Tensor = field(default_factory=lambda: torch.arange(2_000))
    drafted: Tensor | None = None

    def run(
        self, toy: Toy, settings: SamplingSettings, noise_type: type[SharedNoise]
    ) -> tuple[Tensor, Tensor]:
        """Which nodes the target can say behind their parents, and which were kept, [B, N]; also
        checks the verdict."""
        rule, tree, roots = self.rule, self.tree, torch.full_like(self.seeds, START)
        noise = noise_type(settings, self.seeds, 5, rule.drafts, True, roots, rule.separate)
        if self.drafted is None:
            proposal = toy.propose(make_plan(tree), torch.zeros_like(roots), roots, noise)
        else:
            proposal = Proposal(self.drafted, tree, toy.drafter[self.drafted])
        logits = toy.target[proposal.tokens]
        verdict = rule.judge(proposal, logits, roots[:, None] + tree.depth, noise)
        beyond = torch.arange(verdict.path.shape[1]) > verdict.accepted[:, None]
        assert consistent(verdict, proposal) and not verdict.path[beyond].any()
        p = shape_logits(logits, settings).softmax(-1)
        rows = torch.arange(len(roots))[:, None]
        possible = p[rows, tree.parents, proposal.tokens] > 0
        kept = torch.zeros_like(possible).scatter_(1, verdict.path, True)
        possible[:, 0], kept[:, 0] = True, False
        return possible, kept

    def check_the_impossible_is_never_kept(self) -> None:
        """What the target cannot say is kept by no coin, but would be by one below 0."""
        toy, settings = Toy.random(), SamplingSettings(1.0, top_k=2)
        for coin in (0.0, HIGHEST):
            possible, kept = self.run(toy, settings, coins_of(coin))
            assert not possible.all() and not (kept & ~possible).any()
        # the control: `<=` keeps them
        possible, kept = self.run(toy, settings, coins_of(JUST_BELOW))
        assert (kept & ~possible).any()

    def check_a_perfect_draft_is_always_kept(self, path: list[int]) -> None:
        """If the drafter is the target, every node of `path`, of the first children, is kept."""
        toy, settings = Toy.random(), SamplingSettings(0.7)
        toy.drafter = toy.target
        for noise_type in (SharedNoise, coins_of(HIGHEST)):
            _, kept = self.run(toy, settings, noise_type)
            assert kept[:, path].all()
        # the control: no coin may show 1
        _, kept = self.run(toy, settings, coins_of(1.0))
        assert not kept[:, path[0]].any()
