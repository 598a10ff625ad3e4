"""A target known only by its config: the number of its weights, and the cost of its forward pass.

The model is built from transformers' own classes without memory (fake tensors), so the counts are
those of the real model. Operations are those of passes over a few tokens, so every attention and
every use of experts counts as it runs. Products with the LM head are not part of computing
features.

Legend: B rows, T positions.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
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
from train.planning.footprint import FlopCount


class _NoTokenizer:
    """Placeholder for a tokenizer, which a plan does not need."""

    special_tokens_map: dict[str, str] = {}  # noqa: RUF012
    eos_token_id = None

    def get_vocab(self) -> dict[str, int]:
        return {}


@dataclass(frozen=True)
class PlannedTarget:
    """weights: those that drafters share, as fake tensors of `mode`; active: weights of matrix
    products that one token uses; pairs: FLOPs of all layers' attention, indexers included, for one
    query and one key; experts: numbers that one token's experts hold between their products, in the
    layer with the most of them (0 for dense targets)."""

    info: TargetInfo
    weights: TargetWeights
    mode: FakeTensorMode
    dtype: torch.dtype
    weight_bytes: int
    layer_bytes: int
    largest_layer: int
    active: int
    pairs: int
    experts: int
    cache: CacheSizes

    def flops(self, rows: int, length: int) -> int:
        """FLOPs of one pass over [B, T]: 2 per active weight and position, and attention over whole
        rows. This is an upper bound, since packed documents are attended to one by one."""
        return rows * length * (2 * self.active + self.pairs * length)

    def activations(self, rows: int, length: int, needs: FeatureSpec) -> int:
        """Bytes at the peak of one forward pass: the features that are kept, one running layer,
        rotary positions, and, for windows shorter than a row, the mask of a block of queries
        (`inference.target.causal`), one row per query head of a group. Scores for soft-capping or
        sinks are not included."""
        info, size, positions = self.info, self.dtype.itemsize, rows * length
        kept = positions * info.hidden_size * size * states_of(needs)
        queries = info.num_attention_heads
        # a key's and a value's size; in latent attention they are wider than `head_dim`
        both = max(2 * info.head_dim, self.pairs // (2 * queries * info.num_layers))
        attention = both * (queries + info.num_key_value_heads) + 2 * info.hidden_size
        mlp = self.experts or 3 * info.intermediate_size
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
    with mode:  # a few tokens through the real passes show what they store and compute
        switch_attention(model)
        try:
            with _without_experts(model) as experts:
                target = TargetModel(model, _NoTokenizer(), info)
                with FlopCount() as first:
                    cache = target.cache_sizes()
                one, two, three = first.flops, *(_prefill_flops(target, n) for n in (2, 3))
        except (DynamicOutputShapeException, DataDependentOutputException) as error:
            raise UserError(
                f"'{info.id}' ({info.model_type}) cannot be planned by its config: its layers "
                "compute by the values of their inputs, which a plan does not have. Train without "
                "--plan; the memory that a run takes is in its log."
            ) from error
    pairs = (three - 2 * two + one) // 2  # F(T) = constant + linear T + pairs T^2
    chosen = sum(use.chosen * use.weights for use in experts)
    return PlannedTarget(
        info=info,
        weights=shared_weights(model),
        mode=mode,
        dtype=DTYPES[config.dtype_name],
        weight_bytes=sum(p.nbytes for p in model.parameters()),
        layer_bytes=sum(sizes),
        largest_layer=max(sizes),
        active=(two - one - 3 * pairs) // 2 + chosen,
        pairs=pairs,
        experts=max((use.numbers for use in experts), default=0),
        cache=cache,
    )


@dataclass
class _ExpertUse:
    """The experts of one layer: the number that one token runs through, the weights of each, and
    the width of their inputs and outputs."""

    chosen: int
    weights: int
    width: int = 0

    @property
    def numbers(self) -> int:
        """Numbers that one token's experts hold: their input, two projections [.., I] in one
        tensor, an activation and a product. A gated expert has 3 I H weights."""
        return self.chosen * (self.width + 4 * self.weights // (3 * max(1, self.width)))


@contextmanager
def _without_experts(model: nn.Module) -> Iterator[list[_ExpertUse]]:
    """Make experts return zeros: they store nothing, and the tokens of an expert depend on values,
    which fake tensors do not have. Yields their uses, which the passes inside the block fill in."""
    experts = [module for name, module in model.named_modules() if name.endswith(".experts")]
    uses = []
    for module in experts:
        matrices = [p for name, p in module.named_parameters() if not name.endswith("bias")]
        stacked = next((len(p) for p in matrices if p.dim() == 3), 1)
        total = int(getattr(module, "num_experts", stacked))
        use = _ExpertUse(total, sum(p.numel() for p in matrices) // total)
        uses.append(use)
        module.forward = partial(_no_experts, use)
    try:
        yield uses
    finally:
        for module in experts:
            del module.forward


def _no_experts(use: _ExpertUse, hidden: Tensor, indices: Tensor | None = None, *_: Any) -> Tensor:
    """Note the experts [..., k] that a token runs through; without a choice (Llama 4) all run."""
    use.width = hidden.shape[-1]
    if indices is not None:
        use.chosen = indices.shape[-1]
    return torch.zeros_like(hidden)


def _prefill_flops(target: TargetModel, length: int) -> int:
    """FLOPs of reading one row of `length` tokens, without experts."""
    tokens = torch.zeros(1, length, dtype=torch.int64)
    lengths = torch.tensor([length])
    with FlopCount() as count:
        target.prefill(target.new_cache(1, length), tokens[0, :1], tokens, lengths, FeatureSpec())
    return count.flops
