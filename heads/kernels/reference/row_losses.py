"""Losses of rows of logits against a target's, all requested ones at once, in plain torch.
`heads/kernels/row_losses.py` holds the Triton kernels.

Each loss is defined by the function of its name in `heads.nn.losses`. The kernels save memory
traffic: those functions hold float32 copies of the logits, while the two kernels read the logits in
their own dtype and write nothing of that width except the gradient (`heads/kernels/row_losses.py`
counts the bytes).

Legend: M positions, V vocabulary, ... leading dimensions that share the target's rows (steps).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from heads.kernels.dispatch import FLOATS, Op
from heads.nn import losses

CROSS_ENTROPY = "cross_entropy"
SOFT_CROSS_ENTROPY = "soft_cross_entropy"
FORWARD_KL = "forward_kl"
REVERSE_KL = "reverse_kl"
JENSEN_SHANNON = "jensen_shannon"
TOTAL_VARIATION = "total_variation"
ACCEPTANCE_NLL = "acceptance_nll"
NAMES = (
    CROSS_ENTROPY,
    SOFT_CROSS_ENTROPY,
    FORWARD_KL,
    REVERSE_KL,
    JENSEN_SHANNON,
    TOTAL_VARIATION,
    ACCEPTANCE_NLL,
)
"""Available losses. `cross_entropy` needs labels, all others the target's logits."""


@dataclass(frozen=True)
class RowLosses:
    """values: a loss [..., M] by its name, in float32 (float64 stays float64); best [..., M] int64:
    the drafter's likeliest token; target_best [M] int64: the target's, None without its logits."""

    values: dict[str, Tensor]
    best: Tensor
    target_best: Tensor | None

    def __getitem__(self, name: str) -> Tensor:
        return self.values[name]


def row_losses(
    logits: Tensor,
    target_logits: Tensor | None = None,
    labels: Tensor | None = None,
    names: Sequence[str] = (),
    temperature: float = 1.0,
    beta: float = 0.5,
) -> RowLosses:
    """Losses `names` of logits [..., M, V] against the target's [M, V], without gradient for these,
    and labels int64 (broadcast to [..., M]).

    temperature: of both distributions in all losses except the cross entropy; beta: of
    `jensen_shannon`.
    """
    values = {}
    if CROSS_ENTROPY in names:
        assert labels is not None, "the cross entropy needs labels"
        flat, aims = logits.flatten(0, -2), labels.expand(logits.shape[:-1]).flatten()
        values[CROSS_ENTROPY] = losses.cross_entropy(flat, aims).view(logits.shape[:-1])
    if any(name != CROSS_ENTROPY for name in names):
        assert target_logits is not None, f"{names} need the target's logits"
        drafted = at_temperature(logits, temperature)
        wanted = at_temperature(target_logits.detach(), temperature)
        soft = _soft(beta)
        values |= {name: soft[name](drafted, wanted) for name in names if name in soft}
    assert len(values) == len(names), names
    best = losses.best_column(logits.detach())
    target_best = None if target_logits is None else losses.best_column(target_logits)
    return RowLosses(values, best, target_best)


def at_temperature(logits: Tensor, temperature: float) -> Tensor:
    """The logits divided in float32; at 1 without a pass over them."""
    return logits if temperature == 1.0 else losses.widen(logits) / temperature


def _soft(beta: float) -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    """The losses against the target's distribution, as functions of both logits."""
    return {
        SOFT_CROSS_ENTROPY: lambda q, p: losses.soft_cross_entropy(q, losses.probabilities_of(p)),
        FORWARD_KL: losses.forward_kl,
        REVERSE_KL: losses.reverse_kl,
        JENSEN_SHANNON: lambda q, p: losses.jensen_shannon(q, p, beta),
        TOTAL_VARIATION: losses.total_variation,
        ACCEPTANCE_NLL: losses.acceptance_nll,
    }


ROW_LOSSES = Op("row_losses", row_losses, "heads.kernels.row_losses:row_losses", FLOATS)
