"""Rejection sampling of chains (Leviathan et al., 2211.17192; Chen et al., 2302.01318).

A draft x drawn from q is kept with probability min(1, p(x) / q(x)). The first draft that is not
kept is replaced by a draw from max(p - q, 0). If the whole chain is kept, the next token is drawn
from p. Committed tokens follow p exactly, and a draft is kept with probability 1 - TV(p, q), the
maximum for one draft.

Certain drafts, and all drafts at temperature 0, are judged by `match`. For the noise, see
`inference.decoding.rules.weights`.

Legend: B rows, N nodes, D = N - 1 drafted tokens, V vocabulary.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from heads.api.tree import DraftShape
from inference.decoding.rules.accept import leading
from inference.decoding.rules.base import Rule, RuleOptions
from inference.decoding.rules.weights import Chain, ChainRule


class Rejection(ChainRule):
    """See the module. Chains only."""

    name: ClassVar[str] = "rejection"

    def keep(self, chain: Chain, coins: Tensor) -> tuple[Tensor, Tensor | None]:
        # p / q > coin without the division; strict, so tokens with p = 0 are never kept
        kept = coins * chain.q_drafted < chain.p_drafted
        return leading(kept), None


def make(shape: DraftShape, options: RuleOptions) -> Rule:
    """The rule for drafts of `shape`."""
    return Rejection()
