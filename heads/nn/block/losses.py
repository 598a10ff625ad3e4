"""Objectives of block drafters: the losses of a slot, and the weight of each depth.

The objective is a mix of cross entropy against the answer's token, KL and total variation against
the target's distribution, and the LK losses. Depths weigh exp(-(k - 1) / gamma), all the same, or
by D-PACE (2605.18810): by how much the expected accepted length would grow with the log-probability
of the right token at that depth,

    w_k = d / d log c_k  sum over m of prod over j <= m of c_j  =  sum over m >= k of prod over j <=
                         m of c_j,

with c_j the drafter's own probability q_j of the right token, without gradient: the confidence
accumulated up to k times the value of continuing from there. Smoothing a (its equation 7) uses c_j
= (1 - a) q_j + a, so that deep tokens are learned before the first ones are right.

Legend: B rows, M blocks, K depths, R supervised (block, depth) pairs, V vocabulary, E ends of the
objective.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from heads.api.errors import UserError, suggest
from heads.kernels.reference.row_losses import (
    ACCEPTANCE_NLL,
    CROSS_ENTROPY,
    FORWARD_KL,
    TOTAL_VARIATION,
    RowLosses,
)
from heads.nn import losses
from heads.nn.checkpointing import recomputed

WEIGHTINGS = ("exponential", "uniform", "d_pace")


@dataclass(frozen=True)
class Objective:
    """Weights of the losses, none below 0, one above. lk: -log of the acceptance rate; annealed_lk:
    KL that turns into total variation as the drafter gets better.

    How far it has turned depends on the mean acceptance of a row's blocks at a depth, which is
    known after all of them have run. So the objective of a block is computed at both ends, with KL
    and with total variation, and the sums over a row's blocks are mixed.
    """

    ce: float
    kl: float
    tv: float
    lk: float
    annealed_lk: float

    def __post_init__(self) -> None:
        losses.require_objective("block", vars(self))

    @property
    def soft(self) -> bool:
        """Whether any loss uses the target's distribution."""
        return max(self.kl, self.tv, self.lk, self.annealed_lk) > 0

    @property
    def weights(self) -> dict[str, float]:
        """The weights above 0 of losses of rows, by the losses' names; all but `annealed_lk`."""
        weights = {
            CROSS_ENTROPY: self.ce,
            FORWARD_KL: self.kl,
            TOTAL_VARIATION: self.tv,
            ACCEPTANCE_NLL: self.lk,
        }
        return {name: weight for name, weight in weights.items() if weight > 0}

    @property
    def names(self) -> tuple[str, ...]:
        """The losses of rows that the objective consists of."""
        annealed = (FORWARD_KL, TOTAL_VARIATION) if self.annealed_lk > 0 else ()
        return tuple(dict.fromkeys([*self.weights, *annealed]))

    def hits(self, found: RowLosses, labels: Tensor) -> Tensor:
        """Whether the drafter's likeliest token is the one [R] that this objective ranks first: the
        answer's, or the target's best if the target's distribution weighs more."""
        soft = self.kl + self.tv + self.lk + self.annealed_lk > self.ce
        aim = found.target_best if soft and found.target_best is not None else labels
        return found.best == aim

    def ends(self, found: RowLosses) -> Tensor:
        """The weighted sums [E, R] of the losses `names`: with annealed_lk as KL and as total
        variation (E = 2), or without it (E = 1)."""
        values = [weight * found[name] for name, weight in self.weights.items()]
        if self.annealed_lk == 0:
            return torch.stack(values).sum(0, keepdim=True)
        ends = torch.stack([found[FORWARD_KL], found[TOTAL_VARIATION]])
        return torch.stack([self.annealed_lk * ends, *(v.expand_as(ends) for v in values)]).sum(0)

    def mixed(self, ends: Tensor, distance: Tensor, counts: Tensor) -> Tensor:
        """Sums [E, B, K] of `ends` by row and depth -> the objective's [B, K]; distance, counts [B,
        K]: the sums of the total variation, without gradient, and the numbers of supervised
        pairs."""
        if self.annealed_lk == 0:
            return ends[0]
        return losses.annealed_lk(ends[0], ends[1], 1.0 - distance / counts.clamp(min=1))


def sum_over_blocks(part: Callable[[int], losses.Sums], blocks: int, chunk: int) -> losses.Sums:
    """Add up part(first) over the chunks of `chunk` of a row's `blocks` blocks, given the number of
    their first one. If there are several, each is recomputed in the backward pass."""
    if blocks <= chunk:
        return part(0)
    parts: list[losses.Sums] = [recomputed(part, first) for first in range(0, blocks, chunk)]
    return tuple(sum(values[1:], values[0]) for values in zip(*parts, strict=True))


def by_row_and_depth(items: Tensor, block: Tensor, depth: Tensor, size: tuple[int, ...]) -> Tensor:
    """Sums of items [..., R] at different (block [R], depth [R]) -> [..., B, K]; size: B, the
    blocks per row, and K."""
    rows, blocks, depths = size
    spread = items.new_zeros(*items.shape[:-1], rows * blocks, depths)
    spread[..., block, depth] = items
    return spread.unflatten(-2, (rows, blocks)).sum(-2)


@dataclass(frozen=True)
class Weighting:
    """The weights of the depths. gamma: of the exponential, in depths; 0: (block size + 5) / 3,
    which gives the published 7, 5 and 4 for blocks of 16, 10 and 7; smoothing: of D-PACE."""

    name: str
    gamma: float
    block_size: int
    smoothing: float = 0.5

    def __post_init__(self) -> None:
        if self.name not in WEIGHTINGS:
            raise UserError(
                f"head.depth_weights '{self.name}' is unknown.{suggest(self.name, WEIGHTINGS)}"
            )
        if self.gamma < 0:
            raise UserError(f"head.gamma must not be below 0; given {self.gamma}.")

    @property
    def by_probability(self) -> bool:
        """Whether weights depend on the drafter's probabilities of the right tokens."""
        return self.name == "d_pace"

    def __call__(self, right: Tensor, valid: Tensor) -> Tensor:
        """Weights [M, K] without gradient, where `valid` [M, K]; right [M, K]: log-probabilities of
        the right tokens, used only if `by_probability`."""
        if self.by_probability:
            return d_pace(right, valid, self.smoothing)
        depths = torch.arange(right.shape[1], device=right.device, dtype=right.dtype)
        if self.name == "uniform":
            return torch.ones_like(depths).expand_as(right)
        gamma = self.gamma or (self.block_size + 5) / 3
        return (-depths / gamma).exp().expand_as(right)


def d_pace(right: Tensor, valid: Tensor, smoothing: float) -> Tensor:
    """D-PACE's weights [M, K] (2605.18810) for log q [M, K]; the first invalid depth ends it."""
    confidence = torch.lerp(right.detach().exp(), torch.ones_like(right), smoothing)
    reached = (confidence * valid).cumprod(1)
    return reached.flip(1).cumsum(1).flip(1)
