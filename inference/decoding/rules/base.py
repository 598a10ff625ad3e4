"""The contract of acceptance rules.

A rule gets the drafted tree and the target's logits at every node, and decides which path is kept
and which token follows it. It has fixed shapes and never reads a value back from the device, so
that it can be captured as part of a step.

Legend: B rows, N nodes, D the tree's deepest level, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from heads.api.drafter import Proposal
from inference.decoding.sampling.noise import SharedNoise, Stream


@dataclass
class Verdict:
    """What a rule kept of one verification.

    path [B, D+1] int64: nodes of the kept path, root first; entries beyond it repeat the root.
    accepted [B] int64: drafted tokens on it. refused [B] bool: drafted tokens were tested at its
    last node and none was kept. tokens [B, D+1] int64: entry i is the token committed after path
    node i, so entry `accepted` is the bonus (or the token drawn in place of a rejected one); later
    entries are meaningless.
    """

    path: Tensor
    accepted: Tensor
    refused: Tensor
    tokens: Tensor


def without_dead(proposal: Proposal) -> Tensor:
    """The drafted tokens [B, N], with -1 (never a target's pick) beyond `Proposal.limit`."""
    if proposal.limit is None:
        return proposal.tokens
    return torch.where(proposal.tree.depth <= proposal.limit[:, None], proposal.tokens, -1)


def tested(refused: Tensor, accepted: Tensor, proposal: Proposal) -> Tensor:
    """`refused` [B] bool without the rows whose path ended at the limit: nothing was tested
    there."""
    return refused if proposal.limit is None else refused & (accepted < proposal.limit)


@dataclass(frozen=True)
class RuleOptions:
    """The settings of all rules. share_noise: only for `match`; epsilon, delta: only for
    `typical`."""

    share_noise: bool = True
    epsilon: float = 0.09
    delta: float = 0.3


class Rule(Protocol):
    """One acceptance rule. Its module has a function `make(shape, options) -> Rule`, where shape is
    what drafters fill, on the decoding device. `inference.decoding.rules.names` has its promise.

    drafts: the stream that drafts are drawn with, if any. keeps_logits, separate: see `Noise`.
    """

    name: ClassVar[str]
    drafts: Stream | None
    keeps_logits: bool
    separate: bool

    def judge(
        self, proposal: Proposal, logits: Tensor, positions: Tensor, noise: SharedNoise
    ) -> Verdict:
        """Decide what is kept. logits [B, N, V] of the target (processors applied, not yet
        tempered); positions [B, N] of the nodes: the token after a node is at its position + 1."""
        ...
