"""Shared parts of drafters that continue the target's own states: the frozen embedding and LM head,
sizes that follow the target, a layer copied from it, and the loss of many drafted steps summed
state by state.

Legend: B rows, T positions, M selected states, K steps, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from heads.api.batch import LossOutput, TrainBatch
from heads.api.config import OptionalLayer, Size, Weight, config
from heads.api.drafter import TrainableDrafter
from heads.api.errors import UserError
from heads.api.target_info import TargetInfo, TargetWeights
from heads.api.tree import DraftShape
from heads.kernels.reference.row_losses import CROSS_ENTROPY, ROW_LOSSES, SOFT_CROSS_ENTROPY
from heads.nn import init, losses
from heads.nn.blocks import Attention, LayerShape
from heads.nn.drafting.plan import PlanCache
from heads.nn.early_gradient import with_gradient
from heads.nn.feature.parallel import AnchoredRows
from heads.nn.target.llama import start_heads, unlike_llama

Judge = Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
"""(outputs [K, M, H] of the steps that predict from each state, flat states [M]) -> loss [K, M],
whether it counts (bool, broadcast over [K, M]), and whether the drafted token is the target's (bool
[K, M])."""


@config("head")
@dataclass(frozen=True)
class SizeConfig:
    """Sizes of a drafter's layer; those of 0 are taken from the target."""

    num_attention_heads: Size = 0
    """Query heads."""
    num_key_value_heads: Size = 0
    """Key/value heads; must divide the query heads."""
    head_dim: Size = 0
    """Size of a head (even)."""
    intermediate_size: Size = 0
    """Width of the MLP."""
    initial_std: Weight = 0.0
    """Largest standard deviation of random initial weights, which otherwise is 1 / sqrt(inputs) of
    a matrix; 0: no limit. Many models start at 0.02."""


@config("head")
@dataclass(frozen=True)
class LayerConfig(SizeConfig):
    """A layer that can start as a copy."""

    from_target_layer: OptionalLayer = -1
    """Start from this target layer (0-based; Llama-like, of the same sizes); -1: random."""


class FeatureDrafter(TrainableDrafter):
    """Base of the kinds that read the target's states and its embedding."""

    def __init__(self, config: Any, info: TargetInfo) -> None:
        super().__init__(config, info)
        self.plans = PlanCache(self.one_pass)

    def embed(self, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        """Embeddings [..., H] of tokens [...]: the target's, shared and frozen."""
        return self.target.embed(tokens, dtype)

    def copy_final_norm(self, weight: Tensor, weights: TargetWeights) -> None:
        """Start a final norm from the target's, if that has Hugging Face's usual name."""
        final_norm = weights.final_norm()
        if final_norm is not None:
            init.copy(weight, final_norm)

    def copy_layer(
        self, weights: TargetWeights, layer: int, attention: Attention, wanted: dict[str, Tensor]
    ) -> None:
        """Fill the tensors of `wanted` (name within a decoder layer of Hugging Face's Llama -> own
        tensor) from layer `layer` (0-based) of the target, and the norms of heads of `attention`;
        raises `UserError` when it has no such layer, or one of another kind or size."""
        if reason := unlike_llama(self.info, weights, layer):
            raise UserError(
                f"head.from_target_layer={layer} does not fit target '{self.info.id}' "
                f"({self.info.model_type}), whose layer computes something else than one of a "
                f"drafter: {reason}. Use -1."
            )
        named = {f"{name}.weight": parameter for name, parameter in wanted.items()}
        self.copy_tensors(weights, layer, named)
        projections = {name: wanted[f"self_attn.{name}_proj"] for name in "qk"}
        # without a norm before it, the attention reads states after the target's last norm
        factors = wanted.get("input_layernorm", weights.final_norm())
        given = 1.0 if factors is None else factors
        start_heads(attention, projections, weights.state, layer, given)

    def copy_tensors(self, weights: TargetWeights, layer: int, wanted: dict[str, Tensor]) -> None:
        """`copy_layer` for tensors of any kind, by their whole names within the layer."""
        prefix = f"model.layers.{layer}."
        for name, parameter in wanted.items():
            value = weights.state.get(f"{prefix}{name}")
            if value is None or value.shape != parameter.shape:
                raise UserError(
                    f"head.from_target_layer={layer} does not fit target '{self.info.id}' "
                    f"({self.info.model_type}, {self.info.num_layers} layers): no "
                    f"{prefix}{name} of shape {list(parameter.shape)}. Use -1, or leave "
                    "the head's sizes at 0."
                )
            init.copy(parameter, value)


def require_heads(drafter: TrainableDrafter, tree: DraftShape) -> None:
    """Raise `UserError` if `tree` is deeper than the number of heads of a drafter with one head per
    depth."""
    heads = drafter.config.num_heads
    if tree.max_depth > heads:
        raise UserError(
            f"a {drafter.kind} drafter of {heads} heads cannot draft {tree.max_depth} tokens. Set "
            f"decode.depth to {heads} or less, or train with head.num_heads={tree.max_depth}."
        )


def layer_shape(config: Any, info: TargetInfo) -> LayerShape:
    """A layer's sizes from the configuration; from the target where that has 0 or no value."""
    names = [item.name for item in fields(LayerShape) if item.default is MISSING]
    sizes: dict[str, Any] = {n: getattr(config, n, 0) or getattr(info, n) for n in names}
    return LayerShape(**sizes, qk_norm=getattr(config, "qk_norm", False))


def layer_weights(layer: nn.Module, *parts: str) -> dict[str, Tensor]:
    """Weights of a decoder layer's `parts` by name: all matrices of self_attn and mlp, norms."""
    names = {
        "self_attn": [f"self_attn.{name}_proj" for name in "qkvo"],
        "mlp": [f"mlp.{name}_proj" for name in ("gate", "up", "down")],
    }
    return {
        name: layer.get_submodule(name).weight  # type: ignore[misc]
        for part in parts
        for name in names.get(part, [part])
    }


def sum_by_state(
    batch: TrainBatch,
    outputs: Tensor,
    places: Tensor,
    wanted: Tensor,
    columns: int,
    judge: Judge,
    shares: Tensor | None = None,
    frozen: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, correct and supervised predictions per step [K]. Each target state is evaluated once
    for all its steps. Losses are weighed by the weights of `batch`.

    outputs [R, H]: all predictions; places [K, B*T] int64: which of them predicts from each flat
    state at each step; wanted [B*T, K] bool: which of these are supervised; columns: elements of
    the widest row that `judge` works on; shares [R]: how many predictions each of `outputs` stands
    for, in all three sums; None: itself alone. frozen: `judge` uses no trained weight, so gradients
    are computed at once.
    """

    def part(states_at: Tensor) -> losses.Sums:
        mask, at = wanted[states_at].T, places[:, states_at]  # [K, M]
        chosen = outputs.index_select(0, at.flatten()).unflatten(0, mask.shape)

        def look(seen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return judge(seen, states_at)

        values, counts, hits = with_gradient(look, chosen) if frozen else look(chosen)
        values, counted = batch.weighed(values, states_at, depths), mask
        if shares is not None:
            values, counted = values * shares[at].to(values.dtype), mask * shares[at]
        total = losses.masked_sum(values.T, (mask & counts).T)
        return total, (hits * counted).sum(1), counted.sum(1)

    depths = torch.arange(1, places.shape[0] + 1, device=places.device)[:, None]
    rows = wanted.any(1).nonzero().squeeze(1)
    total, correct, counts = losses.sum_over_rows(part, rows, columns, recompute=not frozen)
    return total, correct, counts


def unrolled_loss(
    batch: TrainBatch,
    unrolled: list[Tensor],
    columns: int,
    weights: Tensor,
    judge: Judge,
    taught: int = 0,
    anchors: AnchoredRows | None = None,
    frozen: bool = False,
) -> LossOutput:
    """Weighted loss of unrolled steps: outputs [B, T, H] each, step k at row t predicting token
    t+k+1; weights [K]; columns: width of the logits that `judge` makes at every step; taught: width
    of the target's logits, which it makes once for all steps (wider if the draft vocabulary is
    reduced). anchors: the only positions behind which later steps were unrolled, with outputs [B,
    A, H]; they stand for all. frozen: see `sum_by_state`."""
    steps = len(unrolled)
    flat, width = torch.cat([each.flatten(0, 1) for each in unrolled]), max(steps * columns, taught)
    if anchors is not None:
        places, wanted = anchors.places(batch, steps)
        shares = anchors.shares(batch)
        sums = sum_by_state(batch, flat, places, wanted, width, judge, shares, frozen)
        return losses.weighted_output(weights, *sums)
    wanted = losses.supervised_states(batch, steps)
    # The place of step k's prediction from each state among the concatenated outputs: step k at row
    # t predicts from state t+k. States without such a row are not supervised.
    behind = torch.arange(1, steps + 1, device=wanted.device)[:, None]
    rows = (torch.arange(wanted.shape[0], device=wanted.device) - behind).clamp(min=0)
    places = (behind - 1) * wanted.shape[0] + rows
    sums = sum_by_state(batch, flat, places, wanted, width, judge, frozen=frozen)
    return losses.weighted_output(weights, *sums)


def add_noise(states: Tensor, batch: TrainBatch, size: float) -> Tensor:
    """States [B, T, H] with noise from U(-size, size), drawn row by row from the batch's seeds."""
    if size == 0:
        return states
    drawn = [torch.rand(states.shape[1:], generator=each) for each in batch.generators()]
    return states + (2 * torch.stack(drawn) - 1).mul_(size).to(states)


@torch.no_grad()
def teacher_logits(batch: TrainBatch, states_at: Tensor) -> Tensor:
    """The target's logits [M, V] at flat states [M]."""
    assert batch.last_hidden is not None, "this loss needs the target's last hidden state"
    assert batch.target_logits is not None, "this loss needs the target's logits"
    return batch.target_logits(batch.last_hidden.flatten(0, 1)[states_at])


def label_loss(
    batch: TrainBatch, logits: Tensor, labels: Tensor, states_at: Tensor, hard: float
) -> tuple[Tensor, Tensor]:
    """Losses [..., M] of logits [..., M, V] against the answer's tokens `labels` [..., M] or [M],
    whose share is `hard`, and the target's distributions at flat states of the same shape as the
    labels; and whether the likeliest token [..., M] is the right one: the target's likeliest if the
    target is used, else the answer's."""
    if hard == 1:
        found = ROW_LOSSES(logits, None, labels, (CROSS_ENTROPY,))
        return found[CROSS_ENTROPY], found.best == labels
    rows = logits.flatten(0, labels.dim() - 1) if labels.dim() > 1 else logits
    teacher = teacher_logits(batch, states_at.flatten())
    names = (SOFT_CROSS_ENTROPY, CROSS_ENTROPY) if hard > 0 else (SOFT_CROSS_ENTROPY,)
    found = ROW_LOSSES(rows, teacher, labels.flatten(), names)
    values = found[SOFT_CROSS_ENTROPY]
    if hard > 0:
        values = torch.lerp(values, found[CROSS_ENTROPY], hard)
    shape = logits.shape[:-1]
    return values.view(shape), (found.best == found.target_best).view(shape)


def next_tokens(batch: TrainBatch, states_at: Tensor) -> Tensor:
    """The token [M] after each flat state [M]; meaningless after the very last one."""
    tokens = batch.tokens.flatten()
    return tokens[(states_at + 1).clamp(max=tokens.shape[0] - 1)]
