"""P-EAGLE: EAGLE-3's inputs, all depths drafted in one pass.

The last true row predicts the first token as in EAGLE-3. The rows behind it know neither their
token nor the target's state: a learnt `mask_hidden` stands in for the fused taps and a learnt
embedding for the token (Hui et al., 2602.01469). So the drafter runs once per
verification, whatever the depth, and can afford several layers. The first layer reads embedding and
feature side by side as EAGLE-3's does; the others are plain decoder layers. Training:
`heads.nn.feature.parallel`; the loss is EAGLE-3's, the cross entropy against the target's
distribution on the draft vocabulary. Parameter names are those of vLLM, but for
`mask_embedding`: engines read it as the mask token's row of an own embedding, which here is the
target's, frozen.

Legend: B rows, T positions, K depths, M mask rows, H hidden, V' draft vocabulary, n taps, L layers,
S cache slots, W width of a committed run, E mask rows in use (depth of the draft - 1), g key/value
heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from heads.api.batch import LossOutput, TrainBatch
from heads.api.checkpoint import unset_parameters
from heads.api.config import Fraction, NonNegativeInt, PositiveInt, UnitInterval, config
from heads.api.drafter import Noise, Proposal, TargetStates
from heads.api.target_info import TargetInfo, TargetWeights
from heads.api.tree import DraftShape
from heads.nn import init, losses
from heads.nn.attention import (
    additive,
    cache_attention,
    packed_mask,
    sequence_attention,
    write_cache,
)
from heads.nn.blocks import DecoderLayer, FusingLayer
from heads.nn.drafting.growth import fill
from heads.nn.drafting.plan import Plan, last_valid
from heads.nn.feature.base import layer_shape, sum_by_state
from heads.nn.feature.parallel import Anchors, anchored_attention
from heads.nn.feature.taps import TapConfig, TapDrafter, look_at_itself
from heads.nn.rope import Rope, look_up


@config("head")
@dataclass(frozen=True)
class Config(TapConfig):
    """Configuration of P-EAGLE. Sizes of 0 are taken from the target."""

    own_embedding: bool = False
    """An embedding of its own, trained, started from the target's (V * H weights), as the library
    `speculators` trains it."""
    num_layers: NonNegativeInt = 0
    """Decoder layers (>= 0); 0: a quarter of the target's, at least 1 and at most 4 (4 in the
    paper)."""
    num_attention_heads: int = 0
    """Query heads."""
    num_key_value_heads: int = 0
    """Key/value heads; must divide the query heads."""
    head_dim: int = 0
    """Size of a head (even)."""
    intermediate_size: int = 0
    """Width of the MLP."""
    draft_vocab_size: int = 0
    """Tokens that can be drafted, the most frequent ones of the training data; 0: the whole
    vocabulary."""
    depths: PositiveInt = 5
    """Depths that are trained (>= 1); deeper ones can be drafted, ever less well."""
    keep: Fraction = 0.7
    """Share of anchors that each further depth keeps in training (0 < keep <= 1; COD)."""
    keep_at_least: UnitInterval = 0.2
    """Least share of anchors at any depth (0 to 1)."""
    decay: Fraction = 1.0
    """Depth k (1-based) weighs decay^(k-1) in the loss, besides being rarer (0 < decay <= 1)."""
    hard_label_weight: UnitInterval = 0.0
    """Share of the loss taken against the sampled token instead of the target's distribution (0 to
    1)."""


@dataclass
class State:
    """keys, values: per layer [B, S, g, D], row t in slot t, behind them room for mask rows. output
    [B, 1 + E, H]: the normalised outputs of the last true row and the mask rows. root,
    root_position [B] int64.
    """

    keys: list[Tensor]
    values: list[Tensor]
    output: Tensor
    root: Tensor
    root_position: Tensor
    plan: Plan


class Drafter(TapDrafter):
    """A P-EAGLE draft head."""

    kind: ClassVar[str] = "peagle"
    label_weight: ClassVar[str] = "hard_label_weight"
    layers: nn.ModuleList

    def __init__(self, config: Config, info: TargetInfo) -> None:
        shape = layer_shape(config, info)
        count = config.num_layers or min(4, max(1, info.num_layers // 4))
        layers = nn.ModuleList(
            [FusingLayer(shape), *(DecoderLayer(shape) for _ in range(count - 1))]
        )
        super().__init__(config, info, {"layers": layers})
        self.mask_hidden = nn.Parameter(torch.empty(1, 1, len(self.needs.taps) * info.hidden_size))
        self.mask_embedding = nn.Parameter(torch.empty(info.hidden_size))
        self.embed_tokens = (
            nn.Embedding(info.vocab_size, info.hidden_size) if config.own_embedding else None
        )
        self._rope = Rope(shape.head_dim, info.rope_theta)
        unset_parameters(self)

    def initialise(self, weights: TargetWeights, generator: torch.Generator) -> None:
        """See `TapDrafter`; an unknown token starts as the mean of all tokens, an unknown state as
        a small random one."""
        super().initialise(weights, generator)
        look_at_itself(cast(FusingLayer, self.layers[0]).self_attn)
        init.normal(self.mask_hidden, 0.02, generator)
        init.copy(self.mask_embedding, weights.embedding.float().mean(0))
        if self.embed_tokens is not None:
            init.copy(self.embed_tokens.weight, weights.embedding)

    def embed(self, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        """The own embeddings [..., H] of tokens [...], or the target's."""
        if self.embed_tokens is None:
            return super().embed(tokens, dtype)
        out: Tensor = self.embed_tokens(tokens).to(dtype)
        return out

    def _unknown(self, batch: int, rows: int) -> tuple[Tensor, Tensor]:
        """Embedding and feature of mask rows, [batch, rows, H] each."""
        taps = self.mask_hidden.unflatten(-1, (len(self.needs.taps), -1))
        shape = (batch, rows, self.info.hidden_size)
        return self.mask_embedding.expand(shape), self.fuse(taps).expand(shape)

    def _read(self, index: int, embedded: Tensor, states: Tensor) -> Tensor:
        """What layer `index` feeds its attention: states [B, T, H], and the embeddings in the first
        layer."""
        layer = self.layers[index]
        if isinstance(layer, FusingLayer):
            return layer.read(embedded, states)
        normed: Tensor = cast(DecoderLayer, layer).input_layernorm(states)
        return normed

    # Training

    def _parallel(self, batch: TrainBatch, anchors: Anchors) -> list[Tensor]:
        """Normalised outputs of the true rows [B, T, H] and of the mask rows [B, size, H], depth by
        depth."""
        assert batch.taps is not None, "peagle needs the target's taps"
        rows, length = batch.tokens.shape
        true = self.fuse(batch.taps)
        known = self.embed(batch.tokens.roll(-1, 1), true.dtype)
        masked_embedding, masked = self._unknown(rows, sum(anchors.sizes))
        embedded = torch.cat([known, masked_embedding.to(known.dtype)], 1)
        # [B, T + M, H]: each layer's matrices run once over all rows
        states = torch.cat([true, masked], 1)
        positions = [batch.positions]
        positions += [
            anchors.at(batch.positions, row) + row for row in range(1, len(anchors.sizes) + 1)
        ]
        rotation = self._rope.at(torch.cat(positions, 1), states.dtype)
        mask, visible = packed_mask(batch.segments), anchors.visible(batch.segments)
        for index in range(len(self.layers)):
            layer = cast(FusingLayer | DecoderLayer, self.layers[index])
            attn = layer.self_attn
            read = self._read(index, embedded, states)
            states = self.residual(layer, states)
            query, (key, value) = attn.query(read, rotation), attn.key_value(read, rotation)
            splits = [length, *anchors.sizes]
            queries, keys, values = (list(part.split(splits, 1)) for part in (query, key, value))
            attended = [sequence_attention(queries[0], keys[0], values[0], mask)]
            for row, size in enumerate(anchors.sizes, start=1):
                own_keys, own_values = (
                    [part[:, :size] for part in parts[1 : row + 1]] for parts in (keys, values)
                )
                seen = visible[:, :, :size]
                attended.append(
                    anchored_attention(queries[row], keys[0], values[0], own_keys, own_values, seen)
                )
            states = layer.finish(states, torch.cat(attended, 1))
        normed: Tensor = self.norm(states)
        return list(normed.split([length, *anchors.sizes], 1))

    def loss(self, batch: TrainBatch) -> LossOutput:
        """Sum over depths k of decay^(k-1) times the cross entropy of token t+k+1, over supervised
        tokens of the anchors kept.

        Positions whose most likely target token lies outside the draft vocabulary carry no loss and
        count as wrong.
        """
        config: Config = self.config
        anchors = Anchors.dropped(batch, config.depths, config.keep, config.keep_at_least)
        outputs = torch.cat([output.flatten(0, 1) for output in self._parallel(batch, anchors)])
        places, wanted = anchors.places(batch, config.depths)
        # of all depths, of the target
        columns = max(config.depths * self.lm_head.out_features, self.info.vocab_size)
        per_depth, correct, counts = sum_by_state(
            batch, outputs, places, wanted, columns, partial(self.judge, batch)
        )
        weights = config.decay ** torch.arange(
            config.depths, device=per_depth.device, dtype=per_depth.dtype
        )
        return LossOutput(
            (weights * per_depth).sum(), losses.depth_metrics(per_depth, correct, counts)
        )

    def train_logits(self, batch: TrainBatch, depth: int) -> list[Tensor]:
        """Logits [B, T, V'] of depths 1..depth with no anchor dropped; see the contract."""
        return [
            self.lm_head(output)
            for output in self._parallel(batch, Anchors.everywhere(batch, depth))
        ]

    # Drafting

    def start(self, seen: TargetStates, tree: DraftShape, capacity: int) -> State:
        """State after prefill; see the protocol."""
        batch, width = seen.tokens.shape
        plan, attn = self.plans.of(tree), cast(FusingLayer, self.layers[0]).self_attn
        slots = max(capacity, width) + plan.max_depth + 1
        cache = (batch, slots, attn.k_proj.out_features // attn.head_dim, attn.head_dim)
        weight = self.fc.weight
        self.set_columns()
        state = State(
            keys=[weight.new_zeros(cache) for _ in self.layers],
            values=[weight.new_zeros(cache) for _ in self.layers],
            output=weight.new_zeros(batch, plan.max_depth, self.info.hidden_size),
            root=seen.tokens.new_zeros(batch),
            root_position=seen.tokens.new_zeros(batch),
            plan=plan,
        )
        return self.commit(state, seen)

    def commit(self, state: State, accepted: TargetStates) -> State:
        """One pass over the accepted run and the mask rows behind it.

        Padded entries are written behind the run: the mask rows overwrite them, or stand before
        them.
        """
        assert accepted.taps is not None, "peagle needs the target's taps"
        rows, last, root, root_position = last_valid(accepted)
        batch, width = accepted.tokens.shape
        masks = torch.arange(state.plan.max_depth - 1, device=root.device)
        true = self.fuse(accepted.taps)
        masked_embedding, masked = self._unknown(batch, masks.shape[0])
        embedded = self.embed(accepted.next_tokens, true.dtype)
        embedded, states = torch.cat([embedded, masked_embedding], 1), torch.cat([true, masked], 1)
        own = accepted.positions[:, :1] + torch.arange(width, device=root.device)
        slots = torch.cat([own, root_position[:, None] + masks], 1)  # [B, W + E], positions as well
        rotation = look_up(
            self._rope.table(state.keys[0].shape[1], slots.device, states.dtype), slots
        )
        seen = torch.arange(state.keys[0].shape[1], device=slots.device) <= slots[..., None]
        mask = additive(seen, states.dtype)  # [B, W + E, S]
        row_index, wanted = (
            rows[:, None],
            torch.cat([last[:, None], (width + masks).expand(batch, -1)], 1),
        )
        for index in range(len(self.layers)):
            layer = cast(FusingLayer | DecoderLayer, self.layers[index])
            read = self._read(index, embedded, states)
            states = self.residual(layer, states)
            key, value = layer.self_attn.key_value(read, rotation)
            # mask rows last: they share slots with padding
            for span in (slice(0, width), slice(width, None)):
                write_cache(state.keys[index], row_index, slots[:, span], key[:, span])
                write_cache(state.values[index], row_index, slots[:, span], value[:, span])
            if index == len(self.layers) - 1:  # only what predicts goes on
                at = (row_index, wanted)
                read, states, mask = read[at], states[at], mask[at]
                rotation = (rotation[0][at], rotation[1][at])
            query = layer.self_attn.query(read, rotation)
            states = layer.finish(
                states, cache_attention(query, state.keys[index], state.values[index], mask)
            )
        state.output.copy_(self.norm(states))
        state.root.copy_(root)
        state.root_position.copy_(root_position)
        return state

    def propose(self, state: State, noise: Noise) -> Proposal:
        """Every depth was computed by `commit`; a node's token depends on its depth and rank
        alone."""
        logits = self.lm_head(state.output)  # [B, D, V']
        return fill(state.plan, state.root, state.root_position, logits, noise, self.columns)
