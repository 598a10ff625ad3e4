"""A drafter sped up by another drafter: speculative decoding inside one proposal.

The upper level (a `Reader`) drafts a chain. Instead of running it once per token, the lower level
proposes a few tokens per inner round and the upper level checks them in one pass. The upper's own
choice at every position is `noise.pick` of its logits at the absolute position, and a proposed
token is kept if it equals that choice. So the chain is exactly the one that the upper would have
drafted alone, as far as it gets. Rounds are fixed in number and size, and nothing synchronises with
the device; a row whose proposals were rejected ends with a shorter chain.

A round is a small step of the decode loop, with the upper level in the place of the target. Tokens
that it keeps are committed to the lower level, whose state is restored afterwards, because they are
not committed text.

Legend: B rows, W tokens read per round (the known one and the lower's), R rounds, D deepest level
wanted, C = 1 + R * W the deepest level that can be reached, N nodes, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from heads.api.drafter import Drafter, Noise, Proposal, Reader, TargetStates
from heads.api.state import scratch
from heads.nn.drafting.plan import TreePlan


@dataclass
class Drafted:
    """A chain behind the root. tokens [B, C+1] int64, the root first; live [B] int64: how many
    drafted ones count (at least 1); logits [B, C, V]: row d is the one from which the token at
    depth d+1 was drawn; None if they are not needed."""

    tokens: Tensor
    live: Tensor
    logits: Tensor | None


class Quiet:
    """The same noise for the lower level, whose logits are not needed."""

    keeps_logits = False
    separate = False

    def __init__(self, noise: Noise) -> None:
        self.scores, self.pick, self.tempered = noise.scores, noise.pick, noise.tempered


def draft_chain(
    lower: Drafter,
    lower_state: Any,
    upper: Reader,
    upper_state: Any,
    root: Tensor,
    root_position: Tensor,
    rounds: int,
    noise: Noise,
    keep: bool,
) -> Drafted:
    """The upper's chain behind `root` [B] at `root_position` [B], in `rounds` passes.

    The lower was started with a chain of W-1 tokens and room for C + 1 positions behind the root,
    the upper with a tree C deep.
    """
    logits = upper.root_logits(upper_state)[:, None]  # [B, 1, V]
    # [B, 1]: the upper's choice that has not been read yet
    known = noise.pick(logits, root_position[:, None] + 1)
    tokens, live = torch.cat([root[:, None], known], 1), torch.ones_like(root)
    if rounds == 0:
        return Drafted(tokens, live, logits if keep else None)
    rows = torch.arange(root.shape[0], device=root.device)[:, None]
    with scratch(lower_state):
        lower.commit(lower_state, _run(root[:, None], known, root_position[:, None], live))
        for number in range(rounds):
            # [B, W]; the first one is the known token
            window = lower.propose(lower_state, Quiet(noise)).tokens
            width = window.shape[1]
            if number == 0:
                tokens = F.pad(tokens, (0, rounds * width))
                kept = F.pad(logits, (0, 0, 0, rounds * width if keep else 0))
            read = upper.read(upper_state, window, live - 1)  # [B, W, V]
            # of the window's tokens
            depth = live[:, None] + torch.arange(width, device=root.device)
            picks = noise.pick(read, root_position[:, None] + depth + 1)
            agreed = (window[:, 1:] == picks[:, :-1]).to(torch.int64).cumprod(1).sum(1)
            # tokens after the first rejection are overwritten in the next round, or stay beyond
            # `live`
            tokens.scatter_(1, depth + 1, picks)
            if keep:
                kept[rows, depth] = read
            if number + 1 < rounds:
                positions = root_position[:, None] + depth
                lower.commit(lower_state, _run(window, picks, positions, agreed + 1))
            live = live + agreed + 1
    return Drafted(tokens, live, kept if keep else None)


def _run(tokens: Tensor, following: Tensor, positions: Tensor, lengths: Tensor) -> TargetStates:
    """A run for the lower level: `lengths` [B] of tokens [B, W] with the upper's choices."""
    place = torch.arange(tokens.shape[1], device=tokens.device)
    return TargetStates(tokens, following, positions, place < lengths[:, None])


def fill_tree(plan: TreePlan, drafted: Drafted, root_position: Tensor, noise: Noise) -> Proposal:
    """The tree of `plan`: the chain along its best path, and the upper's next choices beside it.

    Nodes deeper than the chain are dead (`Proposal.limit`) and repeat the root; so do the nodes
    below second choices, which the upper has not read.
    """
    depth, root = plan.max_depth, drafted.tokens[:, :1]
    width = drafted.tokens.shape[1]
    levels = torch.arange(depth + 1, device=root.device)
    chain = drafted.tokens[:, : depth + 1]
    if width < depth + 1:
        chain = torch.cat([chain, root.expand(-1, depth + 1 - width)], 1)
    live = levels <= drafted.live[:, None]  # [B, D+1]
    chain = torch.where(live, chain, root)
    limit = drafted.live.clamp(max=depth)
    logits = None
    if drafted.logits is not None:
        short = max(0, depth + 1 - drafted.logits.shape[1])
        logits = F.pad(drafted.logits[:, : depth + 1], (0, 0, 0, short))  # [B, D+1, V]
    if plan.tree.is_chain:
        return Proposal(chain, plan.tree, logits if noise.keeps_logits else None, limit=limit)
    tokens = chain[:, plan.node_depth]
    if plan.max_rank > 0:
        assert logits is not None, "siblings are chosen from the upper's logits"
        beside = _siblings(plan, chain, live, logits, root_position, noise)
        tokens = torch.where(plan.best_path, tokens, beside)
    if not noise.keeps_logits:
        return Proposal(tokens, plan.tree, limit=limit)
    assert logits is not None
    # [B, 1, V]: the logits of nodes that repeat the root
    repeated = certain(root, logits.shape[2], logits.dtype)
    here = (plan.best_path & live.roll(-1, 1)[:, plan.node_depth])[..., None]
    logits = torch.where(here, logits[:, plan.node_depth], repeated)
    return Proposal(tokens, plan.tree, logits, limit=limit)


def _siblings(
    plan: TreePlan, chain: Tensor, live: Tensor, logits: Tensor, root_position: Tensor, noise: Noise
) -> Tensor:
    """Tokens [B, N] of the nodes beside the chain, below its nodes; elsewhere the root's."""
    depth = plan.max_depth
    levels = torch.arange(1, depth + 1, device=chain.device)
    scores = noise.scores(logits[:, :depth], root_position[:, None] + levels)
    scores = scores.scatter(2, chain[:, 1:, None], float("-inf"))
    # [B, D, ranks]
    ranked = torch.cat([chain[:, 1:, None], scores.topk(plan.max_rank, dim=-1).indices], 2)
    ranked = torch.where(live[:, 1:, None], ranked, chain[:, :1, None]).flatten(1)
    found = F.pad(ranked[:, plan.by_depth_and_rank], (1, 0))
    beside = plan.best_path.gather(0, plan.tree.parents[0])
    return torch.where(beside, found, chain[:, :1])


def certain(tokens: Tensor, vocabulary: int, dtype: torch.dtype) -> Tensor:
    """Logits [B, M, V] of drafts that are certain: 0 at the token [B, M], -inf elsewhere."""
    out = torch.full((*tokens.shape, vocabulary), float("-inf"), dtype=dtype, device=tokens.device)
    return out.scatter(2, tokens[..., None], 0.0)
