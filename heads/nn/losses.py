"""Losses between a drafter's and the target's next-token distributions, and their sums.

Every loss maps logits to one value per position [M]; callers add them up. All are computed in
float32 (float64 stays float64), also under autocast: see `full_precision`. `sum_over_rows` limits
vocabulary-wide float32 tensors to a chunk of positions at a time. TV is one minus the acceptance
rate (Leviathan et al., 2211.17192); each divergence names its source.

Legend: M positions, V vocabulary. p is the target's distribution, q the drafter's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any, ParamSpec, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from heads.api.batch import LossOutput, TrainBatch
from heads.api.errors import UserError
from heads.nn import chunks

CHUNK_ELEMENTS = 1 << 25
"""Most elements of a [positions, vocabulary] tensor (128 MiB in float32) in one chunk on a CPU."""
CHUNK_SHARE = 1 / 80
"""Share of a GPU's memory that such a tensor may have in float32, of which a loss holds several: a
gibibyte of 80. Small chunks cost launches and recomputation there."""


def chunk_elements(device: torch.device) -> int:
    """Most elements of a [positions, vocabulary] tensor in one chunk on this device."""
    if device.type != "cuda":
        return CHUNK_ELEMENTS
    return gpu_chunk_elements(torch.cuda.get_device_properties(device).total_memory)


def gpu_chunk_elements(memory: int) -> int:
    """`chunk_elements` of a GPU with this many bytes of memory."""
    return max(CHUNK_ELEMENTS, 1 << (int(memory * CHUNK_SHARE) // 4).bit_length() - 1)


@contextmanager
def chunks_of(elements: int) -> Iterator[None]:
    """Within the block, chunks on the CPU have at most `elements`: a plan counts another device's
    step with tensors that claim to be there (train/planning/plan.py)."""
    global CHUNK_ELEMENTS
    before, CHUNK_ELEMENTS = CHUNK_ELEMENTS, elements
    try:
        yield
    finally:
        CHUNK_ELEMENTS = before


Given = ParamSpec("Given")


def full_precision(loss: Callable[Given, Tensor]) -> Callable[Given, Tensor]:
    """Mark a loss or a divergence, whose first argument is a tensor: it runs outside of autocast.

    Under autocast, dot products of float32 vectors (vecdot, matmul, einsum, ...) are taken in
    bfloat16, which has 8 significant bits: losses would be off by several per mille, and
    divergences, differences of such products, would come out negative. Every function of logits
    that enters a loss carries this mark. The function itself casts its inputs with `widen`, so that
    it can keep narrow logits for its backward pass.
    """

    @wraps(loss)
    def run(*args: Given.args, **kwargs: Given.kwargs) -> Tensor:
        first = args[0]
        assert isinstance(first, Tensor)
        with torch.autocast(first.device.type, enabled=False):
            return loss(*args, **kwargs)

    return run


def widen(values: Tensor) -> Tensor:
    """The values in float32; float64 stays float64."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def probabilities_of(logits: Tensor) -> Tensor:
    """Softmax in float32 (float64 stays float64)."""
    return logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))


def _log_softmax(logits: Tensor) -> Tensor:
    return F.log_softmax(logits, -1, dtype=torch.promote_types(logits.dtype, torch.float32))


@full_precision
def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """-log q(label): logits [M, V], labels [M] int64 -> [M]."""
    return F.cross_entropy(widen(logits), labels, reduction="none")


class _SoftCrossEntropy(torch.autograd.Function):
    """-sum p log softmax(z) for probabilities p that sum to one, minus the entropy of p if it is
    given. It keeps only z for the backward pass: its gradient is softmax(z) - p."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, probabilities: Tensor, entropy: Tensor | None) -> Tensor:
        scores = logits.to(probabilities.dtype)
        norm = scores.logsumexp(-1)
        ctx.save_for_backward(logits, probabilities, norm)
        surprise = norm - torch.linalg.vecdot(scores, probabilities)
        # A divergence is never negative, but the difference of two rounded sums can be.
        return surprise if entropy is None else (surprise - entropy).clamp(min=0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        logits, probabilities, norm = ctx.saved_tensors
        drafted = (logits.to(probabilities.dtype) - norm[..., None]).exp_()
        slope = drafted.sub_(probabilities).mul_(grad[..., None])
        return slope.to(logits.dtype), None, None


@full_precision
def soft_cross_entropy(logits: Tensor, probabilities: Tensor) -> Tensor:
    """-sum p log q: logits [..., V], the target's probabilities [..., V] (float32 or float64,
    summing to one, without gradient, broadcast over leading dimensions) -> [...]. Differs from KL(p
    || q) by the entropy of p."""
    return cast(Tensor, _SoftCrossEntropy.apply(logits, probabilities, None))


@full_precision
def top_k_cross_entropy(logits: Tensor, probabilities: Tensor, count: int) -> Tensor:
    """-sum p log q over the `count` likeliest tokens of p (HASS, 2408.15766).

    logits [K, M, V], probabilities p [M, V] (float32 or float64) -> [K, M].
    """
    best, columns = probabilities.topk(min(count, probabilities.shape[-1]), dim=-1)  # [M, k]
    scores = logits.to(probabilities.dtype)
    chosen = scores.gather(-1, columns.expand(logits.shape[0], -1, -1))
    covered = torch.linalg.vecdot(chosen, best.expand_as(chosen))
    return best.sum(-1) * scores.logsumexp(-1) - covered


@full_precision
def feature_distance(drafted: Tensor, true: Tensor) -> Tensor:
    """Mean SmoothL1 between drafted and true features, both [..., H] (broadcast) -> [...]."""
    drafted, true = torch.broadcast_tensors(widen(drafted), widen(true))
    return F.smooth_l1_loss(drafted, true, reduction="none").mean(-1)


@full_precision
def forward_kl(logits: Tensor, target_logits: Tensor) -> Tensor:
    """KL(p || q) >= 0 per position [M], no gradient for the target: covers all its modes."""
    log_p = _log_softmax(target_logits.detach())
    probabilities = log_p.exp()
    entropy = -torch.linalg.vecdot(probabilities, log_p)
    return cast(Tensor, _SoftCrossEntropy.apply(logits, probabilities, entropy))


@full_precision
def kl_divergence(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p || q) of two distributions given as log-probabilities [M, V] -> [M]; a measurement."""
    log_p, log_q = widen(log_p), widen(log_q)
    return torch.linalg.vecdot(log_p.exp(), log_p - log_q)


@full_precision
def reverse_kl(logits: Tensor, target_logits: Tensor) -> Tensor:
    """KL(q || p) per position [M]: concentrates on the target's main mode."""
    log_q, log_p = _log_softmax(logits), _log_softmax(target_logits)
    return (log_q.exp() * (log_q - log_p)).sum(-1)


@full_precision
def jensen_shannon(logits: Tensor, target_logits: Tensor, beta: float) -> Tensor:
    """Generalised JSD(beta) = beta KL(p || m) + (1 - beta) KL(q || m), m = beta p + (1 - beta) q,
    per position [M].

    0 < beta < 1; 0.5 is the symmetric one (generalised knowledge distillation, 2306.13649).
    """
    log_q, log_p = _log_softmax(logits), _log_softmax(target_logits)
    weights = log_p.new_tensor([beta, 1.0 - beta]).log()
    log_m = torch.logaddexp(log_p + weights[0], log_q + weights[1])
    from_p, from_q = ((log.exp() * (log - log_m)).sum(-1) for log in (log_p, log_q))
    return beta * from_p + (1.0 - beta) * from_q


@full_precision
def total_variation(logits: Tensor, target_logits: Tensor) -> Tensor:
    """TV(p, q) = 1 - sum min(p, q) per position [M], 1 - the acceptance rate of rejection."""
    return 0.5 * (probabilities_of(logits) - probabilities_of(target_logits)).abs().sum(-1)


@full_precision
def acceptance_nll(logits: Tensor, target_logits: Tensor) -> Tensor:
    """-log sum min(p, q) per position [M] (LK losses, 2602.23881: L_alpha). Gradients
    do not vanish where p and q hardly overlap, as those of TV do."""
    smallest = torch.minimum(_log_softmax(logits), _log_softmax(target_logits.detach()))
    return -smallest.logsumexp(-1)


def annealed_lk(
    divergence: Tensor, distance: Tensor, acceptance: Tensor, eta: float = 3.0
) -> Tensor:
    """w KL(p || q) + (1 - w) TV(p, q) of both per position [M] with w = exp(-eta alpha) (LK losses,
    2602.23881: L_lambda): KL while the drafter is poor, TV once it is good.

    acceptance [M], without gradient: each position's alpha. The paper takes the mean over the
    batch, which depends on how rows are dealt to processes; callers take it by row and depth.
    """
    weight = torch.exp(-eta * acceptance)
    return weight * divergence + (1.0 - weight) * distance


@full_precision
def distractor_penalty(logits: Tensor, target_logits: Tensor, labels: Tensor) -> Tensor:
    """sum q(x) max(0, z(label) - z(x)) per position [M], with z the target's logits (LiLiCorr,
    2608.20530): the drafter's probability for tokens that are less likely for the target than the
    label [M] int64, each times the difference; no gradient for the target."""
    scores = widen(target_logits.detach())
    behind = (scores.gather(-1, labels[:, None]) - scores).clamp(min=0)
    return torch.linalg.vecdot(_log_softmax(logits).exp(), behind)


def require_objective(sort: str, weights: Mapping[str, float]) -> None:
    """Raise `UserError` unless the weights of a drafter's losses, by their keys of `head`, are not
    negative and one is positive. sort: of the drafter, for the message."""
    values = list(weights.values())
    if min(values) < 0 or max(values) == 0:
        raise UserError(
            f"a {sort} drafter needs an objective: give a positive weight to one or more of "
            f"head.{', head.'.join(weights)}, and none below 0; given {values}."
        )


Sums = tuple[Tensor, ...]


def sum_over_rows(
    part: Callable[[Tensor], Sums], rows: Tensor, columns: int, recompute: bool = True
) -> Sums:
    """Add up part(rows) over chunks of `rows` [M] int64 of at most `chunk_elements` / columns.

    part returns tensors that are sums over its rows. If there is more than one chunk, each is
    recomputed in the backward pass instead of being kept, unless `part` itself keeps nothing as
    wide as the vocabulary (recompute=False; see `heads.nn.early_gradient`). Collective inside
    `heads.nn.chunks.agreeing`.
    """
    pieces = chunks.split(rows, max(1, chunk_elements(rows.device) // columns))
    if len(pieces) == 1:
        return part(rows)
    total: Sums | None = None
    for piece in pieces:
        sums: Sums = checkpoint(part, piece, use_reentrant=False) if recompute else part(piece)
        total = sums if total is None else tuple(a + b for a, b in zip(total, sums, strict=True))
    assert total is not None
    return total


def best_column(logits: Tensor) -> Tensor:
    """Index of the largest logit [..., V]. In bfloat16 torch's argmax is ten times slower."""
    return widen(logits).argmax(-1)


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Sum of `values` [M, ...] over M where `mask`; masked entries may hold anything."""
    return torch.where(mask, values, values.new_zeros(())).sum(0)


def depth_metrics(
    losses: Tensor, correct: Tensor, counts: Tensor, first: int = 1
) -> dict[str, tuple[Tensor, Tensor]]:
    """Metrics "loss/depthK" and "accuracy/depthK" as (sum, count), from sums per depth [K] each;
    first: the shallowest of these depths."""
    metrics, sums = {}, zip(losses.detach(), correct.detach(), counts.detach(), strict=True)
    for depth, (loss, right, count) in enumerate(sums, start=first):
        metrics[f"loss/depth{depth}"] = loss, count
        metrics[f"accuracy/depth{depth}"] = right, count
    return metrics


def weighted_output(weights: Tensor, losses: Tensor, correct: Tensor, counts: Tensor) -> LossOutput:
    """The loss of sums per depth [K] each, with a weight per depth [K], and `depth_metrics`."""
    total = (weights.to(losses) * losses).sum()
    return LossOutput(total, depth_metrics(losses, correct, counts))


def supervised_states(batch: TrainBatch, steps: int) -> Tensor:
    """[B*T, K] bool: whether row s-k of step k predicts a supervised token after state s."""
    # rows that roll over from the end have nothing ahead, so they are not supervised
    shifted = [batch.supervised(k + 1).roll(k, 1).flatten() for k in range(1, steps + 1)]
    return torch.stack(shifted, 1)
