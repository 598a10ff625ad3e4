"""The batch that the trainer passes to a drafter's loss, and the result.

Legend: B rows, T positions, H hidden, V vocabulary, n taps, M selected positions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class TrainBatch:
    """Packed token sequences with the target's features at every position.

    tokens [B, T] int64; positions [B, T] int64, restarting at 0 with each packed document; segments
    [B, T] int32, the document's number within the row starting at 1, 0 on padding; loss_mask [B, T]
    bool, True where the token AT this position belongs to a supervised answer; taps [B, T, n, H] or
    None; last_hidden [B, T, H] or None (post final norm). target_logits: maps last_hidden rows [M,
    H] to the target's logits [M, V]; None unless the drafter needs logits. seeds [B] int64 on the
    host: one per row, from the step and the row's place in it, so that the random numbers of a loss
    are the same for any number of processes and after a restart; None: the row's number. progress:
    share of the training that is done (0 to 1), for objectives that change during training. weights
    [B, T] float32: weight of the loss of the token AT this position; anchors [B, T] float32: weight
    of all losses of a draft whose root, the last token before it, is AT this position. Both have
    mean 1 over the answers' supervised tokens; None: all 1.
    """

    tokens: Tensor
    positions: Tensor
    segments: Tensor
    loss_mask: Tensor
    taps: Tensor | None = None
    last_hidden: Tensor | None = None
    target_logits: Callable[[Tensor], Tensor] | None = None
    seeds: Tensor | None = None
    progress: float = 0.0
    weights: Tensor | None = None
    anchors: Tensor | None = None

    def generators(self) -> list[torch.Generator]:
        """One CPU generator per row. Every call returns generators with the same streams."""
        seeds = range(self.tokens.shape[0]) if self.seeds is None else self.seeds.tolist()
        return [torch.Generator().manual_seed(seed) for seed in seeds]

    def supervised(self, ahead: int) -> Tensor:
        """[B, T] bool: True at t when token t+ahead is in the same document and supervised."""
        mask, rest = torch.zeros_like(self.loss_mask), self.tokens.shape[1] - ahead
        if rest > 0:
            later = self.segments[:, ahead:]
            same = (later == self.segments[:, :rest]) & (later > 0)
            mask[:, :rest] = self.loss_mask[:, ahead:] & same
        return mask

    def supervised_ahead(self, count: int) -> Tensor:
        """[B*T, K] bool: `supervised(k + 1)` for k = 1..`count`, by flat state."""
        ahead = [self.supervised(k + 1).flatten() for k in range(1, count + 1)]
        return torch.stack(ahead, 1)

    def weighed(self, values: Tensor, states: Tensor, depth: Tensor | int = 1) -> Tensor:
        """Losses `values` times the weights of the predicted tokens: the token after each flat
        state (row x T + t) in `states`, at `depth` (1 for the token after the root) of a draft. All
        three broadcast. Returns `values` itself if the batch has no weights.

        Places outside the batch are clamped; their values are meaningless, but not supervised.
        """
        last, roots = self.tokens.numel() - 1, states - depth + 1
        if self.weights is not None:
            values = values * self.weights.flatten()[(states + 1).clamp(max=last)].to(values.dtype)
        if self.anchors is not None:
            values = values * self.anchors.flatten()[roots.clamp(min=0)].to(values.dtype)
        return values


@dataclass
class LossOutput:
    """A loss as a sum, with the counts that are needed to average it.

    loss_sum: differentiable scalar, summed over supervised positions (and over depths with the
    kind's weights). The trainer divides by the supervised tokens of the whole global step. metrics:
    name -> (sum, count), detached scalars; for instance "accuracy/depth1".
    """

    loss_sum: Tensor
    metrics: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
