"""The `match` rule: a node is kept if it is the target's pick at its parent.

The text is then the target's picks along one path, independent of the draft. It is identical, token
by token, to decoding without a drafter with the same seed, at any temperature.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from heads.api.drafter import Proposal
from heads.api.tree import DraftShape
from inference.decoding.rules.base import Rule, RuleOptions, Verdict, tested, without_dead
from inference.decoding.sampling.noise import SharedNoise, Stream
from inference.kernels.reference.commit import ACCEPT_WALK


class Match:
    """See the module. share: rank drafts with shared Gumbel noise."""

    name: ClassVar[str] = "match"
    keeps_logits = False
    separate = False

    def __init__(self, share: bool = True) -> None:
        self.drafts = Stream.TARGET if share else None

    def judge(
        self, proposal: Proposal, logits: Tensor, positions: Tensor, noise: SharedNoise
    ) -> Verdict:
        return follow(noise.target_pick(logits, positions + 1), proposal)


def follow(picks: Tensor, proposal: Proposal) -> Verdict:
    """The longest path of `proposal` along the target's picks [B, N] at its nodes."""
    found = ACCEPT_WALK(without_dead(proposal), picks, proposal.tree)
    # accepted drafts ARE the picks before them
    tokens = picks if proposal.tree.is_chain else picks.gather(1, found.path)
    refused = tested(found.has_children, found.accepted, proposal)
    return Verdict(found.path, found.accepted, refused, tokens)


def make(shape: DraftShape, options: RuleOptions) -> Rule:
    """The rule for drafts of `shape`."""
    return Match(options.share_noise)
