"""What was drafted for a verification, with its probabilities: for records to learn from.

The details are computed on the device in fixed shapes and copied to the host with the step's
result. Probabilities are those of the models' own distributions (temperature 1, no filters; the
target's after processors), so that they are comparable between requests.

Legend: B rows, N nodes, D the tree's deepest level, V vocabulary, V' its drafted part.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from heads.api.drafter import Proposal
from inference.decoding.rules.base import Verdict


@dataclass(frozen=True)
class PassDetails:
    """One verification of one row.

    drafted: the drafted path; for a chain the whole chain, for a tree the kept path and the first
    rejected child after it. log_q, log_p: natural logarithms of the probabilities that drafter and
    target gave each of its tokens. pick: the target's token after the kept part of the path;
    pick_log_q, pick_log_p: the same for the pick. A log_q is None if the drafter has no
    distribution, or if its distribution does not contain the token.
    """

    drafted: tuple[int, ...]
    log_q: tuple[float | None, ...]
    log_p: tuple[float, ...]
    pick: int
    pick_log_q: float | None
    pick_log_p: float


def pass_details(proposal: Proposal, logits: Tensor, verdict: Verdict, accepted: Tensor) -> Tensor:
    """Packed details [B, 3 D + 2] int64: the path's tokens, then log q and log p of each and of the
    pick, as bits of float32.

    logits [B, N, V] of the target; accepted [B] int64, kept draft tokens per row after cuts.
    Entries of the path after the rejected token are meaningless (chains have none).
    """
    nodes = _path(proposal, verdict)  # [B, D+1]
    drafted = proposal.tokens.gather(1, nodes)[:, 1:]
    before = nodes[:, :-1]
    last = verdict.path.gather(1, accepted[:, None])
    pick = verdict.tokens.gather(1, accepted[:, None])
    asked, at = torch.cat([drafted, pick], 1), torch.cat([before, last], 1)
    log_p = _log(logits, at, asked)
    if proposal.logits is None:
        log_q = torch.full_like(log_p, math.nan)
    elif proposal.token_ids is None:
        log_q = _log(proposal.logits, at, asked)
    else:
        same = asked[..., None] == proposal.token_ids  # [B, D+1, V']
        column = same.to(torch.int64).argmax(-1)
        log_q = torch.where(same.any(-1), _log(proposal.logits, at, column), math.nan)
    split = drafted.shape[1]
    floats = torch.cat([log_q[:, :split], log_p[:, :split], log_q[:, split:], log_p[:, split:]], 1)
    return torch.cat([drafted, floats.contiguous().view(torch.int32).to(torch.int64)], 1)


def _path(proposal: Proposal, verdict: Verdict) -> Tensor:
    """Nodes [B, D+1] of the drafted path; for a tree, the kept path and its first child."""
    tree = proposal.tree
    node = torch.arange(tree.num_nodes, device=proposal.tokens.device)
    if tree.is_chain:
        return node.expand(proposal.tokens.shape[0], -1)
    last = verdict.path.gather(1, verdict.accepted[:, None])
    child = (tree.parents == last) & (node > 0)
    first = child.to(torch.int64).argmax(1, keepdim=True)  # node 0 where there is none
    place = torch.arange(verdict.path.shape[1], device=node.device)
    return torch.where(place == verdict.accepted[:, None] + 1, first, verdict.path)


def _log(logits: Tensor, nodes: Tensor, columns: Tensor) -> Tensor:
    """Log-probability float32 [B, M] of `columns` [B, M] in the distributions at `nodes` [B, M]."""
    logs = logits.float().log_softmax(-1)
    row = torch.arange(logs.shape[0], device=logs.device)[:, None]
    return logs[row, nodes, columns]


def read_details(
    numbers: Sequence[int], chain: bool, accepted: int, rejected: bool, live: int, pick: int
) -> PassDetails:
    """Unpack one row of `pass_details`. live: drafted levels that counted."""
    depth = (len(numbers) - 2) // 3
    floats = torch.tensor(numbers[depth:], dtype=torch.int32).view(torch.float32).tolist()
    shown = min(depth, live) if chain else min(depth, accepted + int(rejected))
    log_q = tuple(None if math.isnan(value) else value for value in floats[:shown])
    last_q = None if math.isnan(floats[-2]) else floats[-2]
    log_p = tuple(floats[depth : depth + shown])
    return PassDetails(tuple(numbers[:shown]), log_q, log_p, pick, last_q, floats[-1])
