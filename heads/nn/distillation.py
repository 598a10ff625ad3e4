"""Distilling the target's next-token distribution: a weighted mix of divergences.

The divergence is a setting because no single one is best everywhere (DistillSpec, 2310.08461). The
LK losses (2602.23881) target the acceptance rate alpha = sum min(p, q) itself. A reference drafter
can select the tokens that are worth learning (AdaSPEC, 2510.19779). It has the same size and was
distilled before, so it shows which tokens can be learnt at all; training keeps the share of tokens
on which the new drafter is furthest behind it.

Legend: B rows, T positions, M predictions, R outputs, K depths, H hidden of the drafter, V
vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from annotated_types import Gt, Le
from torch import Tensor

from heads.api.batch import LossOutput, TrainBatch
from heads.api.config import OpenFraction, Warmth, Weight, config
from heads.kernels.reference.row_losses import (
    ACCEPTANCE_NLL,
    CROSS_ENTROPY,
    FORWARD_KL,
    JENSEN_SHANNON,
    REVERSE_KL,
    ROW_LOSSES,
    TOTAL_VARIATION,
    RowLosses,
)
from heads.nn import chunks, losses
from heads.nn.feature.base import next_tokens, teacher_logits

OBJECTIVES = ("forward_kl", "reverse_kl", "jsd", "tv", "lk", "lk_annealed", "ce")


@config("head")
@dataclass(frozen=True)
class ObjectiveConfig:
    """The objective of the drafter's distribution q; p is the target's distribution."""

    forward_kl: Weight = 1.0
    """Weight of KL(target || drafter)."""
    reverse_kl: Weight = 0.0
    """Weight of KL(drafter || target)."""
    jsd: Weight = 0.0
    """Weight of the generalised Jensen-Shannon divergence."""
    jsd_beta: OpenFraction = 0.5
    """jsd: mixture weight of the target's distribution (0 < beta < 1)."""
    tv: Weight = 0.0
    """Weight of the total variation distance. Alone, it hardly trains a new drafter."""
    lk: Weight = 0.0
    """Weight of -log(acceptance rate), with the rate sum min(p, q) (LK losses: L_alpha)."""
    lk_annealed: Weight = 0.0
    """Weight of w KL + (1 - w) TV with w = exp(-lk_eta x a row's mean acceptance) (L_lambda)."""
    lk_eta: Annotated[float, Gt(0), Le(1000)] = 3.0
    """How fast lk_annealed changes from KL to TV as acceptance rises (> 0)."""
    ce: Weight = 0.0
    """Weight of the cross entropy against the answer's tokens."""
    temperature: Warmth = 1.0
    """Temperature of both distributions in the soft objectives (> 0)."""

    def __post_init__(self) -> None:
        losses.require_objective("distilled", {name: getattr(self, name) for name in OBJECTIVES})

    @property
    def weights(self) -> dict[str, float]:
        """The weights above 0 of losses of rows, by the losses' names; all but `lk_annealed`."""
        weights = {
            CROSS_ENTROPY: self.ce,
            FORWARD_KL: self.forward_kl,
            REVERSE_KL: self.reverse_kl,
            JENSEN_SHANNON: self.jsd,
            TOTAL_VARIATION: self.tv,
            ACCEPTANCE_NLL: self.lk,
        }
        return {name: weight for name, weight in weights.items() if weight > 0}

    @property
    def names(self) -> tuple[str, ...]:
        """The losses of rows that the objectives consist of."""
        annealed = (FORWARD_KL, TOTAL_VARIATION) if self.lk_annealed > 0 else ()
        return tuple(dict.fromkeys([*self.weights, *annealed]))

    @property
    def soft(self) -> bool:
        """Whether any objective compares with the target's distribution."""
        return any(getattr(self, name) > 0 for name in OBJECTIVES if name != "ce")


@dataclass(frozen=True)
class Predictions:
    """The predictions that the loss compares.

    outputs [R, H]: the drafter's normalised states; at [M] int64: the output of each prediction;
    states [M] int64: the flat state (row x T + t) of the target that predicts the same token; depth
    [M] int64: 0 for the first drafted token, below `depths`.
    """

    outputs: Tensor
    at: Tensor
    states: Tensor
    depth: Tensor
    depths: int

    @classmethod
    def next_token(cls, outputs: Tensor, states: Tensor) -> Predictions:
        """Predictions of the next token from outputs [B, T, H] at flat states [M]."""
        return cls(outputs.flatten(0, 1), states, states, torch.zeros_like(states), 1)

    def only(self, chosen: Tensor) -> Predictions:
        """The predictions with these indices [M']."""
        at, states, depth = (part[chosen] for part in (self.at, self.states, self.depth))
        return Predictions(self.outputs, at, states, depth, self.depths)


Head = Callable[[Tensor], Tensor]
"""Normalised states [M, H] -> logits [M, V]."""


def distillation_loss(
    config: ObjectiveConfig, batch: TrainBatch, predictions: Predictions, head: Head, columns: int
) -> LossOutput:
    """The weighted objectives summed over all predictions, with metrics per depth; columns: V."""
    acceptance = _mean_acceptance(config, batch, predictions, head, columns)

    def part(rows: Tensor) -> losses.Sums:
        chosen = predictions.only(rows)
        logits, wanted, labels = _look(config, batch, chosen, head)
        found = compare(config, logits, wanted, labels)
        values = objective(config, found, None if acceptance is None else acceptance[rows])
        values = batch.weighed(values, chosen.states, chosen.depth + 1)
        hits = found.best == (labels if found.target_best is None else found.target_best)
        if predictions.depths == 1:
            return values.sum(0, keepdim=True), hits.sum(0, keepdim=True)
        depths = F.one_hot(chosen.depth, predictions.depths)
        return (values[:, None] * depths).sum(0), (hits[:, None] * depths).sum(0)

    rows = torch.arange(predictions.at.shape[0], device=predictions.at.device)
    total, correct = losses.sum_over_rows(part, rows, columns)
    if predictions.depths == 1:
        count = torch.full_like(correct, rows.shape[0])
    else:
        count = F.one_hot(predictions.depth, predictions.depths).sum(0)
    return LossOutput(total.sum(), losses.depth_metrics(total, correct, count))


def compare(
    config: ObjectiveConfig, logits: Tensor, wanted: Tensor | None, labels: Tensor
) -> RowLosses:
    """The losses that the objectives consist of, for logits and the target's `wanted` [M, V] (None:
    no soft objective) and labels [M] int64."""
    return ROW_LOSSES(logits, wanted, labels, config.names, config.temperature, config.jsd_beta)


def objective(config: ObjectiveConfig, found: RowLosses, alpha: Tensor | None) -> Tensor:
    """Weighted sum of the objectives per prediction [M]; alpha [M]: mean acceptance rates, which
    lk_annealed needs."""
    values = [weight * found[name] for name, weight in config.weights.items()]
    if config.lk_annealed > 0:
        assert alpha is not None, "lk_annealed needs acceptance rates"
        kl, tv = found[FORWARD_KL], found[TOTAL_VARIATION]
        values.append(config.lk_annealed * losses.annealed_lk(kl, tv, alpha, config.lk_eta))
    return torch.stack(values).sum(0)


def _look(
    config: ObjectiveConfig, batch: TrainBatch, chosen: Predictions, head: Head
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Drafter's logits, target's (None without soft objectives) and labels of predictions."""
    wanted = teacher_logits(batch, chosen.states) if config.soft else None
    logits = head(chosen.outputs.index_select(0, chosen.at))
    return logits, wanted, next_tokens(batch, chosen.states)


@torch.no_grad()
def _mean_acceptance(
    config: ObjectiveConfig, batch: TrainBatch, predictions: Predictions, head: Head, columns: int
) -> Tensor | None:
    """[M]: the mean acceptance rate by depth and packed row, when lk_annealed needs it."""
    if config.lk_annealed == 0:
        return None

    def rates(chosen: Predictions) -> Tensor:
        logits, wanted, _ = _look(config, batch, chosen, head)
        names = (TOTAL_VARIATION,)
        return 1.0 - ROW_LOSSES(logits, wanted, None, names, config.temperature)[TOTAL_VARIATION]

    found = _in_chunks(rates, predictions, columns)
    group = (predictions.states // batch.tokens.shape[1]) * predictions.depths + predictions.depth
    size = batch.tokens.shape[0] * predictions.depths
    total = found.new_zeros(size).index_add_(0, group, found)
    count = found.new_zeros(size).index_add_(0, group, torch.ones_like(found))
    return (total / count.clamp(min=1))[group]


def _in_chunks(
    per_prediction: Callable[[Predictions], Tensor], predictions: Predictions, columns: int
) -> Tensor:
    """A value per prediction [M], without ever holding more than a chunk of [M, V]."""
    rows = torch.arange(predictions.at.shape[0], device=predictions.at.device)
    pieces = chunks.split(rows, max(1, losses.chunk_elements(rows.device) // columns))
    return torch.cat([per_prediction(predictions.only(piece)) for piece in pieces])


@torch.no_grad()
def furthest_behind(
    config: ObjectiveConfig,
    batch: TrainBatch,
    drafted: tuple[Predictions, Head],
    reference: tuple[Predictions, Head],
    share: float,
    columns: int,
) -> Tensor:
    """Indices [M'] of the predictions to train on: in every document the `share` (rounded up) with
    the largest loss of the drafter minus loss of the reference, as AdaSPEC selects them. The paper
    selects per batch; per document, the choice does not depend on which documents are packed or
    dealt together."""

    def values(side: tuple[Predictions, Head]) -> Tensor:
        def one(chosen: Predictions) -> Tensor:
            return objective(config, compare(config, *_look(config, batch, chosen, side[1])), None)

        return _in_chunks(one, side[0], columns)

    gap = values(drafted) - values(reference)
    document = _documents(batch, drafted[0].states)
    order = gap.sort(descending=True, stable=True).indices
    # by document, the furthest behind first
    order = order[document[order].sort(stable=True).indices]
    counts = torch.bincount(document, minlength=int(document.max()) + 1 if document.numel() else 1)
    first = counts.cumsum(0) - counts
    sorted_document = document[order]
    rank = torch.arange(order.shape[0], device=order.device) - first[sorted_document]
    return order[rank < (counts[sorted_document] * share).ceil()].sort().values


def _documents(batch: TrainBatch, states: Tensor) -> Tensor:
    """A number [M] for the document that each flat state stands in."""
    segments = batch.segments.long()
    most = segments.max() + 1
    rows = torch.arange(segments.shape[0], device=segments.device)[:, None]
    return (rows * most + segments).flatten()[states]
