"""A target known only by its config: the number of its weights, and the cost of its forward pass.

The model is built from transformers' own classes without memory (fake tensors), so the counts are
those of the real model. Products with the LM head are not part of computing features.

Legend: B rows, T positions, H hidden, I MLP width, h query heads, g key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from transformers import AutoModelForCausalLM
from transformers.initialization import no_init_weights

from heads.api.errors import UserError
from heads.api.features import FeatureSpec
from heads.api.target_info import TargetInfo, TargetWeights
from inference.target.causal import BLOCK
from inference.target.kv_cache import CacheSizes
from inference.target.loading import (
    DTYPES,
    TargetConfig,
    checked_config,
    describe,
    switch_attention,
)
from inference.target.model import TargetModel
from inference.target.shared import shared_weights
from inference.target.taps import find_decoder, find_layers
from train.features.store.codec import states_of


class _NoTokenizer:
    """Placeholder for a tokenizer, which a plan does not need."""

    special_tokens_map: dict[str, str] = {}  # noqa: RUF012
    eos_token_id = None

    def get_vocab(self) -> dict[str, int]:
        return {}


@dataclass(frozen=True)
class PlannedTarget:
    """weights: those that drafters share, as fake tensors of `mode`; active: weights of matrix
    products that one token uses in the layers; experts: the number that one token uses in each
    layer, and their width (0 and 0 for dense targets)."""

    info: TargetInfo
    weights: TargetWeights
    mode: FakeTensorMode
    dtype: torch.dtype
    weight_bytes: int
    layer_bytes: int
    largest_layer: int
    active: int
    experts: tuple[int, int]
    cache: CacheSizes

    def flops(self, rows: int, length: int) -> int:
        """FLOPs of one pass over [B, T]: 2 per active weight and position, and attention over whole
        rows. This is an upper bound, since packed documents are attended to one by one."""
        info, positions = self.info, rows * length
        attention = 4 * info.num_layers * info.num_attention_heads * info.head_dim * length
        return positions * (2 * self.active + attention)

    def activations(self, rows: int, length: int, needs: FeatureSpec) -> int:
        """Bytes at the peak of one forward pass: the features that are kept, one running layer,
        rotary positions, and, for windows shorter than a row, the mask of a block of queries
        (`inference.target.causal`), one row per query head of a group. Scores for soft-capping or
        sinks are not included."""
        info, size, positions = self.info, self.dtype.itemsize, rows * length
        kept = positions * info.hidden_size * size * states_of(needs)
        heads = 2 * info.head_dim * (info.num_attention_heads + info.num_key_value_heads)
        attention = heads + 2 * info.hidden_size
        chosen, width = self.experts
        mlp = chosen * (info.hidden_size + 3 * width) if chosen else 3 * info.intermediate_size
        at_work = positions * size * (2 * info.hidden_size + max(attention, info.hidden_size + mlp))
        rotary = 2 * positions * info.head_dim * size if self.weights.rotary is not None else 0
        groups = info.num_attention_heads // info.num_key_value_heads
        windows = [width for width in self.weights.windows if width and width < length]
        mask = groups * size * BLOCK * min(length, max(windows) + BLOCK) if windows else 0
        return kept + at_work + rotary + mask


def plan_target(config: TargetConfig) -> PlannedTarget:
    """A target described by its config; raises `UserError` if it cannot be a target."""
    described = checked_config(config)
    text = described.get_text_config()
    text.tie_word_embeddings = described.tie_word_embeddings  # of composite models the outer one
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode, no_init_weights():
        model = AutoModelForCausalLM.from_config(text, dtype=DTYPES[config.dtype_name])
        model.tie_weights()  # is left out with the first values
    model.requires_grad_(False)
    info = describe(model, _NoTokenizer(), config)
    layers = find_layers(find_decoder(model), info.num_layers)
    sizes = [sum(p.nbytes for p in layer.parameters()) for layer in layers]
    with mode:  # one token through the real passes shows what they store
        switch_attention(model)
        try:
            with _without_experts(model):
                cache = TargetModel(model, _NoTokenizer(), info).cache_sizes()
        except (DynamicOutputShapeException, DataDependentOutputException) as error:
            raise UserError(
                f"'{info.id}' ({info.model_type}) cannot be planned by its config: its layers "
                "compute by the values of their inputs, which a plan does not have. Train without "
                "--plan; the memory that a run takes is in its log."
            ) from error
    return PlannedTarget(
        info=info,
        weights=shared_weights(model),
        mode=mode,
        dtype=DTYPES[config.dtype_name],
        weight_bytes=sum(p.nbytes for p in model.parameters()),
        layer_bytes=sum(sizes),
        largest_layer=max(sizes),
        active=sum(active_weights(layer, text) for layer in layers),
        experts=_experts(text),
        cache=cache,
    )


@contextmanager
def _without_experts(model: nn.Module) -> Iterator[None]:
    """Make experts return zeros: they store nothing, and the tokens of an expert depend on values,
    which fake tensors do not have."""
    experts = [module for name, module in model.named_modules() if name.endswith(".experts")]
    for module in experts:
        module.forward = lambda hidden, *routed, **more: torch.zeros_like(hidden)
    try:
        yield
    finally:
        for module in experts:
            del module.forward


def active_weights(layer: nn.Module, config: Any) -> int:
    """Weights of matrix products that one token uses; experts count by the chosen share."""
    chosen, total = _experts(config)[0], _number_of_experts(config)
    found = 0.0
    for name, parameter in layer.named_parameters():
        if parameter.dim() == 3:  # all experts of a layer in one tensor
            found += parameter.numel() * chosen / total
        elif parameter.dim() == 2:
            found += parameter.numel() * (chosen / total if ".experts." in name else 1)
    return round(found)


def _number_of_experts(config: Any) -> int:
    names = ("num_local_experts", "num_experts")
    return int(next(filter(None, (getattr(config, name, None) for name in names)), 1))


def _experts(config: Any) -> tuple[int, int]:
    """The number of experts that one token uses, and their width; zeros for a dense model."""
    if _number_of_experts(config) == 1:
        return 0, 0
    width = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    return int(config.num_experts_per_tok), int(width)
