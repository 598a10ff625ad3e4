"""Common parts of the rules that accept by probability: distributions, draws, weighed chains.

p is the target's distribution at a node (temperature and filters applied), q the distribution that
its children were drawn from. Drafts whose q was not kept are certain: q is 1 at the draft. Weighing
a certain draft x accepts it with probability p(x) and otherwise draws from p without x. This is
equivalent to drawing from p and comparing the draw with x, so every lossless rule is `match` for
certain drafts, as it is at temperature 0.

Use of noise within one pass: the draft at position x is drawn with (DRAFT, x) and tried with (COIN,
x), one column per sibling. The token after the kept path, at position x, is drawn with (RESIDUAL,
x). Drafts of one depth share their position and so their noise, but no rule looks at the children
of more than one of them. No pair is shared between passes (`SharedNoise.roots`).

Legend: B rows, N nodes, D = N - 1 drafted tokens of a chain, V vocabulary, V' its drafted part.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from heads.api.drafter import Proposal
from heads.api.tree import DraftShape, TokenTree
from inference.decoding.rules.base import Verdict
from inference.decoding.rules.match import Match, follow
from inference.decoding.sampling.noise import SharedNoise, Stream


def weighs(proposal: Proposal, noise: SharedNoise) -> bool:
    """Whether drafts can be weighed: a row is above temperature 0 and the logits were kept."""
    return proposal.logits is not None and noise.samples


def or_match(verdict: Verdict, proposal: Proposal, logits: Tensor, noise: SharedNoise) -> Verdict:
    """The verdict of weighing; in rows at temperature 0, which may share the batch, the verdict of
    `match`, which picks the likeliest token there."""
    greedy = noise.greedy_rows
    if greedy is None:
        return verdict
    matched = follow(logits.argmax(-1), proposal)
    found = {}
    for item in fields(Verdict):
        weighed = getattr(verdict, item.name)
        rows = greedy.view(-1, *[1] * (weighed.ndim - 1))
        found[item.name] = torch.where(rows, getattr(matched, item.name), weighed)
    return Verdict(**found)


def draw(weights: Tensor, instead: Tensor, positions: Tensor, noise: SharedNoise) -> Tensor:
    """One token [B] per row from `weights` [B, V] (any sum), by the Gumbel-max trick.

    instead [B, V]: used if all weights are 0, which only rounding can cause.
    """
    empty = weights.sum(-1, keepdim=True) <= 0
    scores = torch.where(empty, instead, weights).log()
    return noise.draw(scores[:, None], positions[:, None], Stream.RESIDUAL)[:, 0]


def at_node(values: Tensor, node: Tensor) -> Tensor:
    """The entries [B, V] of `values` [B, N, V] at one node [B] per row."""
    return values[torch.arange(node.shape[0], device=node.device), node]


def committed(drafted: Tensor, accepted: Tensor, bonus: Tensor) -> Tensor:
    """`Verdict.tokens` [B, D+1]: `drafted` [B, D] up to `accepted` [B], then `bonus` [B]."""
    return torch.cat([drafted, bonus[:, None]], 1).scatter(1, accepted[:, None], bonus[:, None])


@dataclass
class Chain:
    """A drafted chain with its weights.

    drafted [B, D] int64; p [B, N, V]; q [B, N, V], 0 after the last draft that counts, where
    nothing was drafted; p_drafted, q_drafted [B, D]: the probabilities of the drafts at the nodes
    where they were drawn; 0 and 1 at dead drafts, which are never kept. limit [B] int64:
    `Proposal.limit`, or None.
    """

    drafted: Tensor
    p: Tensor
    q: Tensor
    p_drafted: Tensor
    q_drafted: Tensor
    limit: Tensor | None = None

    @classmethod
    def of(cls, proposal: Proposal, logits: Tensor, noise: SharedNoise) -> Chain:
        """Weigh `proposal`, whose logits were kept; logits [B, N, V] are the target's."""
        assert proposal.logits is not None and proposal.tree.is_chain
        drafted = proposal.tokens[:, 1:]
        p = noise.target_probabilities(logits)
        scores = noise.draft_logits(proposal.logits[:, :-1], proposal.token_ids)
        q = torch.nn.functional.pad(scores.softmax(-1), (0, 0, 0, 1))
        at, limit = drafted[..., None], proposal.limit
        p_drafted, q_drafted = p[:, :-1].gather(-1, at)[..., 0], q[:, :-1].gather(-1, at)[..., 0]
        if limit is not None:
            # [B, N]: whether a draft that counts follows
            live = torch.arange(p.shape[1], device=p.device) < limit[:, None]
            q = torch.where(live[..., None], q, 0.0)
            p_drafted = torch.where(live[:, :-1], p_drafted, 0.0)
            q_drafted = torch.where(live[:, :-1], q_drafted, 1.0)
        return cls(drafted, p, q, p_drafted, q_drafted, limit)

    def rest(self, accepted: Tensor, shares: Tensor | None = None) -> Tensor:
        """The weights [B, V] of the token after `accepted` [B] drafts, with any sum: max(share * p
        - q, 0).

        shares [B, N]: see `inference.decoding.rules.block`; None: 1. After the last draft q is 0.
        """
        at = accepted[:, None]
        p, q = at_node(self.p, accepted), at_node(self.q, accepted)
        return ((p if shares is None else shares.gather(1, at) * p) - q).clamp(min=0)

    def verdict(
        self, accepted: Tensor, positions: Tensor, noise: SharedNoise, shares: Tensor | None = None
    ) -> Verdict:
        """Keep `accepted` [B] drafts and draw the next token from `rest`. positions [B, N] of the
        nodes."""
        at = accepted[:, None]
        rest = self.rest(accepted, shares)
        bonus = draw(rest, at_node(self.p, accepted), positions.gather(1, at)[:, 0] + 1, noise)
        place = torch.arange(self.p.shape[1], device=rest.device)
        path = torch.where(place <= at, place, 0)
        refused = accepted < (self.drafted.shape[1] if self.limit is None else self.limit)
        return Verdict(path, accepted, refused, committed(self.drafted, accepted, bonus))


class TreeRule(ABC):
    """Base of the rules that weigh the drafts of a static tree. `match` judges dynamic trees,
    certain drafts and temperature 0 (`inference.decoding.rules.specinfer` gives the reason).

    shape: what drafters fill; a static tree is read on the host.
    """

    def __init__(self, shape: DraftShape) -> None:
        self._static = self.keeps_logits = isinstance(shape, TokenTree)
        self.drafts: Stream | None = Stream.DRAFT if self._static else None

    def judge(
        self, proposal: Proposal, logits: Tensor, positions: Tensor, noise: SharedNoise
    ) -> Verdict:
        """See `Rule.judge`."""
        if not (self._static and weighs(proposal, noise)):
            return Match(share=False).judge(proposal, logits, positions, noise)
        verdict = self.weigh(proposal, logits, positions, noise)
        return or_match(verdict, proposal, logits, noise)

    @abstractmethod
    def weigh(
        self, proposal: Proposal, logits: Tensor, positions: Tensor, noise: SharedNoise
    ) -> Verdict:
        """`judge` for drafts with weights in a static tree."""


class ChainRule(ABC):
    """Base of the rules that weigh the drafts of a chain. `match` judges certain drafts and
    temperature 0. A rule implements `keep`, which decides how many drafts are kept."""

    keeps_logits = True
    separate = False
    drafts: Stream | None = Stream.DRAFT

    def judge(
        self, proposal: Proposal, logits: Tensor, positions: Tensor, noise: SharedNoise
    ) -> Verdict:
        """See `Rule.judge`."""
        if not weighs(proposal, noise):
            return Match(share=False).judge(proposal, logits, positions, noise)
        assert noise.roots is not None, "weighing drafts needs noise that is keyed by the pass"
        chain = Chain.of(proposal, logits, noise)
        coins = noise.uniforms(positions[:, 1:], 1)[..., 0]
        accepted, shares = self.keep(chain, coins)
        verdict = chain.verdict(accepted, positions, noise, shares)
        return or_match(verdict, proposal, logits, noise)

    @abstractmethod
    def keep(self, chain: Chain, coins: Tensor) -> tuple[Tensor, Tensor | None]:
        """The number of drafts [B] to keep by `coins` [B, D] in (0, 1), and the shares for
        `Chain.rest`."""
