"""Rejection sampling of chains (Leviathan et al., 2211.17192; Chen et al., 2302.01318).

A draft x that was drawn from q is kept with probability min(1, p(x) / q(x)); the first one that is
not is replaced by a draw from max(p - q, 0); behind a chain that was kept whole comes a draw from
p. What is committed follows p exactly, and a draft is kept with probability 1 - TV(p, q), the most
that any rule reaches for one draft.

Certain drafts and temperature 0: `match` (see `inference.decoding.rules.weights`, also for which
noise is used for what).

Legend: B rows, N nodes, D = N - 1 drafted tokens, V vocabulary.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from heads.api.drafter import Proposal
from heads.api.tree import DraftShape
from inference.decoding.rules.base import Rule, RuleOptions, Verdict
from inference.decoding.rules.match import Match
from inference.decoding.rules.weights import Chain, weighs
from inference.decoding.sampling.noise import SharedNoise, Stream


class Rejection:
    """See the module. Chains only."""

    name: ClassVar[str] = "rejection"
    lossless: ClassVar[bool] = True
    keeps_logits = True

    def __init__(self) -> None:
        self.drafts: Stream | None = Stream.DRAFT
        self._match = Match(share=False)

    def judge(
        self, proposal: Proposal, logits: Tensor, positions: Tensor, noise: SharedNoise
    ) -> Verdict:
        """See `Rule.judge`."""
        if not weighs(proposal, noise):
            return self._match.judge(proposal, logits, positions, noise)
        chain = Chain.of(proposal, logits, noise.settings)
        coins = noise.uniforms(positions[:, 1:], 1)[..., 0]
        # p / q > coin without the division, and strictly: what the target cannot say is never kept
        kept = coins * chain.q_drafted < chain.p_drafted
        accepted = kept.to(torch.int64).cumprod(1).sum(1)
        return chain.verdict(accepted, positions, noise)


def make(shape: DraftShape, options: RuleOptions) -> Rule:
    """The rule for drafts of `shape`."""
    return Rejection()
