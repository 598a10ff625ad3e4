"""Typical acceptance (Medusa, 2401.10774): LOSSY, as it changes the target's distribution.

A draft x is kept if its probability under the target exceeds a threshold that falls with the
target's entropy: p(x) > min(epsilon, delta * exp(-H(p))), with H the entropy of p (temperature and
filters applied). The longest path of such drafts is kept, of equally long ones the likeliest, and
the next token is drawn from p after it. At temperature 0 it is `match`, and lossless.

Drafts are the drafter's best tokens, without noise, as in the paper.

Legend: B rows, N nodes, V vocabulary.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from heads.api.drafter import Proposal
from heads.api.errors import UserError
from heads.api.tree import DraftShape, TokenTree
from inference.decoding.rules.accept import walk
from inference.decoding.rules.base import Rule, RuleOptions, Verdict, tested
from inference.decoding.rules.match import Match
from inference.decoding.rules.weights import committed
from inference.decoding.sampling.noise import SharedNoise, Stream


class Typical:
    """See the module; LOSSY. epsilon, delta (0..1): the two thresholds; the defaults are Medusa's.

    Raises `UserError` for thresholds outside their ranges.
    """

    name: ClassVar[str] = "typical"
    keeps_logits = False
    separate = False

    def __init__(self, epsilon: float = 0.09, delta: float = 0.3) -> None:
        for name, value in (("epsilon", epsilon), ("delta", delta)):
            if not 0 < value <= 1:
                raise UserError(
                    f"rule 'typical' needs {name} above 0 and at most 1; given: {value}."
                )
        self.epsilon, self.delta = epsilon, delta
        self.drafts: Stream | None = None
        self._match = Match(share=False)

    def judge(
        self, proposal: Proposal, logits: Tensor, positions: Tensor, noise: SharedNoise
    ) -> Verdict:
        """See `Rule.judge`."""
        if noise.settings.greedy:
            return self._match.judge(proposal, logits, positions, noise)
        tokens, tree = proposal.tokens, proposal.tree
        p = noise.target_probabilities(logits)
        enough = (self.delta * torch.exp(-torch.special.entr(p).sum(-1))).clamp(max=self.epsilon)
        parents = tree.parents.expand(tokens.shape[0], -1)
        row = torch.arange(tokens.shape[0], device=tokens.device)[:, None]
        likely = p[row, parents, tokens]
        kept = likely > enough.gather(1, parents)
        if proposal.limit is not None:
            kept = kept & (tree.depth <= proposal.limit[:, None])
        best = self._best_path(kept, likely, tree).to(torch.int64)
        found = walk(best, torch.ones_like(tokens), tree)
        last = found.path.gather(1, found.accepted[:, None])
        bonus = noise.target_pick(logits[row, last], positions.gather(1, last) + 1)[:, 0]
        drafted = tokens.gather(1, found.path[:, 1:])
        refused = tested(found.has_children, found.accepted, proposal)
        kept_tokens = committed(drafted, found.accepted, bonus)
        return Verdict(found.path, found.accepted, refused, kept_tokens)

    def _best_path(self, kept: Tensor, likely: Tensor, tree: TokenTree) -> Tensor:
        """Nodes [B, N] bool of the longest path of kept nodes; of equally long ones, the
        likeliest."""
        if tree.is_chain:
            return kept
        kept = kept.index_fill(1, kept.new_zeros(1, dtype=torch.int64), True)  # the root
        above = tree.ancestors.expand(kept.shape[0], -1, -1)
        depth = torch.where((kept[:, None] | ~above).all(-1), tree.depth, -1)
        chance = torch.where(above[..., 1:], likely.log()[:, None, 1:], 0.0).sum(-1)
        chance = torch.where(depth == depth.amax(1, keepdim=True), chance, float("-inf"))
        best = chance.argmax(1)[:, None, None].expand(-1, 1, kept.shape[1])
        return above.gather(1, best)[:, 0]


def make(shape: DraftShape, options: RuleOptions) -> Rule:
    """The rule for drafts of `shape`."""
    return Typical(options.epsilon, options.delta)
