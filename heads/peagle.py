"""P-EAGLE: EAGLE-3's inputs, with all depths drafted in one pass.

The last true row predicts the first token as in EAGLE-3. The rows behind it have neither a token
nor a state of the target: a learnt `mask_hidden` replaces the taps and a learnt embedding replaces
the token (Hui et al., 2602.01469). The drafter thus runs once per verification, whatever the depth,
and can afford several layers. The first layer reads embedding and feature side by side as EAGLE-3's
does; the others are plain decoder layers. Training: `heads.nn.feature.parallel`; the loss is
EAGLE-3's, the cross entropy against the target's distribution on the draft vocabulary. Parameter
names are those of vLLM, except `mask_embedding`: engines read it as the mask token's row of the
drafter's own embedding, while the embedding here is the target's, frozen.

Legend: B rows, T positions, K depths, M mask rows, H hidden, V' draft vocabulary, n taps, L layers,
S cache slots, W width of a committed run, E mask rows in use (depth of the draft - 1), g key/value
heads, D head size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from heads.api.batch import LossOutput, TrainBatch
from heads.api.checkpoint import unset_parameters
from heads.api.config import Depth, Fraction, Layers, UnitInterval, config
from heads.api.drafter import Noise, Proposal, TargetStates
from heads.api.starts import OtherKind, renamed
from heads.api.target_info import TargetInfo, TargetWeights
from heads.api.tree import DraftShape
from heads.nn import init, losses
from heads.nn.attention import sequence_attention
from heads.nn.blocks import DecoderLayer, FusingLayer
from heads.nn.drafting.growth import fill
from heads.nn.drafting.sight import UpTo
from heads.nn.drafting.state import Cached as State
from heads.nn.drafting.state import run_slots
from heads.nn.feature.base import layer_shape, sum_by_state
from heads.nn.feature.parallel import AnchoredRows, anchored_attention
from heads.nn.feature.taps import TapConfig, TapDrafter
from heads.nn.matrices import set_vectors
from heads.nn.packing import Packing
from heads.nn.rope import Rope, look_up


@config("head")
@dataclass(frozen=True)
class Config(TapConfig):
    """Configuration of P-EAGLE. Sizes of 0 are taken from the target."""

    own_embedding: bool = False
    """Train a separate embedding that starts as the target's (V * H weights; as in
    `speculators`)."""
    num_layers: Layers = 0
    """Decoder layers; 0: a quarter of the target's, at least 1 and at most 4 (4 in the paper)."""
    depths: Depth = 5
    """Number of trained depths (>= 1). Deeper drafts are possible, but get worse with depth."""
    keep: Fraction = 0.7
    """Share of anchors that each further depth keeps in training (0 < keep <= 1; COD)."""
    keep_at_least: UnitInterval = 0.2
    """Smallest share of anchors at any depth (0 to 1)."""
    decay: Fraction = 1.0
    """Depth k (1-based) has the weight decay^(k-1) in the loss (0 < decay <= 1), in addition to
    `keep`."""


def from_eagle3(drafter: Drafter, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """EAGLE-3's layer becomes the first one. The layers after it start with outputs of zero, so
    that the first token is drafted as before."""
    found = renamed(given, "midlayer.", "layers.0.")
    for name, value in drafter.state_dict().items():
        if name not in found and name.endswith(("o_proj.weight", "down_proj.weight")):
            found[name] = torch.zeros_like(value)
    return found


class Drafter(TapDrafter):
    """A P-EAGLE draft head."""

    kind: ClassVar[str] = "peagle"
    label_weight: ClassVar[str] = "hard_label_weight"
    starts_from: ClassVar[Mapping[str, OtherKind]] = {
        "eagle3": OtherKind(from_eagle3, ("layers.[!0]*", "mask_*", "embed_tokens.*"))
    }
    one_pass: ClassVar[bool] = True
    layers: nn.ModuleList

    def __init__(self, config: Config, info: TargetInfo) -> None:
        shape = layer_shape(config, info)
        count = config.num_layers or min(4, max(1, info.num_layers // 4))
        layers = [FusingLayer(shape), *(DecoderLayer(shape) for _ in range(count - 1))]
        super().__init__(config, info, {"layers": nn.ModuleList(layers)})
        hidden = info.hidden_size
        self.mask_hidden = nn.Parameter(torch.empty(1, 1, len(self.needs.taps) * hidden))
        set_vectors(self.mask_hidden)
        self.mask_embedding = nn.Parameter(torch.empty(hidden))
        own = config.own_embedding
        self.embed_tokens = nn.Embedding(info.vocab_size, hidden) if own else None
        self._rope = Rope(shape.head_dim, info.rope_theta)
        unset_parameters(self)

    def initialise(self, weights: TargetWeights, generator: torch.Generator) -> None:
        """See `TapDrafter`; `mask_embedding` starts as the mean of all embeddings, `mask_hidden`
        with small random values."""
        super().initialise(weights, generator)
        init.normal(self.mask_hidden, 0.02, generator)
        init.copy(self.mask_embedding, weights.embedding.float().mean(0))
        if self.embed_tokens is not None:
            init.copy(self.embed_tokens.weight, weights.embedding)

    def embed(self, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        """The own embeddings [..., H] of tokens [...], or the target's."""
        if self.embed_tokens is None:
            return super().embed(tokens, dtype)
        return cast(Tensor, self.embed_tokens(tokens).to(dtype))

    def _unknown(self, batch: int, rows: int) -> tuple[Tensor, Tensor]:
        """Embedding and feature of mask rows, [batch, rows, H] each."""
        taps = self.mask_hidden.unflatten(-1, (len(self.needs.taps), -1))
        shape = (batch, rows, self.info.hidden_size)
        return self.mask_embedding.expand(shape), self.fuse(taps).expand(shape)

    def _read(self, index: int, embedded: Tensor, states: Tensor) -> Tensor:
        """Input of layer `index`'s attention: states [B, T, H], in the first with embeddings."""
        layer = self._layers[index]
        if isinstance(layer, FusingLayer):
            return layer.read(embedded, states)
        return cast(Tensor, layer.input_layernorm(states))

    @property
    def _layers(self) -> list[FusingLayer | DecoderLayer]:
        return cast(list[FusingLayer | DecoderLayer], list(self.layers))

    # Training

    def _parallel(self, batch: TrainBatch, anchors: AnchoredRows) -> list[Tensor]:
        """Normalised outputs of the true rows [B, T, H] and, by depth, mask rows [B, size, H]."""
        assert batch.taps is not None, "peagle needs the target's taps"
        rows, length = batch.tokens.shape
        true = self.fuse(batch.taps)
        known = self.embed(batch.tokens.roll(-1, 1), true.dtype)
        masked_embedding, masked = self._unknown(rows, sum(anchors.sizes))
        embedded = torch.cat([known, masked_embedding.to(known.dtype)], 1)
        # [B, T + M, H]: each layer's matrices run once over all rows
        states = torch.cat([true, masked], 1)
        rows_behind = range(1, len(anchors.sizes) + 1)
        positions = [anchors.at(batch.positions, row) + row for row in rows_behind]
        rotation = self._rope.at(torch.cat([batch.positions, *positions], 1), states.dtype)
        packing, reach = Packing.of(batch), anchors.reach(batch.segments)
        for index, layer in enumerate(self._layers):
            attn = layer.self_attn
            read = self._read(index, embedded, states)
            states = self.residual(layer, states)
            query, (key, value) = attn.query(read, rotation), attn.key_value(read, rotation)
            splits = [length, *anchors.sizes]
            queries, keys, values = (list(part.split(splits, 1)) for part in (query, key, value))
            attended = [sequence_attention(queries[0], keys[0], values[0], packing)]
            for row, size in enumerate(anchors.sizes, start=1):
                seen_keys, seen_values = (
                    [parts[0], *(part[:, :size] for part in parts[1 : row + 1])]
                    for parts in (keys, values)
                )
                seen = seen_keys, seen_values, reach
                attended.append(anchored_attention(queries[row], *seen))
            states = layer.finish(states, torch.cat(attended, 1))
        normed: Tensor = self.norm(states)
        return list(normed.split([length, *anchors.sizes], 1))

    def loss(self, batch: TrainBatch) -> LossOutput:
        """Sum over depths k of decay^(k-1) times the cross entropy of kept supervised tokens t+k+1.

        Positions whose best target token cannot be drafted carry no loss and count as wrong.
        """
        config: Config = self.config
        anchors = AnchoredRows.dropped(batch, config.depths, config.keep, config.keep_at_least)
        outputs = torch.cat([output.flatten(0, 1) for output in self._parallel(batch, anchors)])
        places, wanted = anchors.places(batch, config.depths)
        # of all depths, of the target
        columns = max(config.depths * self.judged_columns, self.info.vocab_size)
        judge = partial(self.judge, batch)
        frozen = self.frozen_head
        sums = sum_by_state(batch, outputs, places, wanted, columns, judge, frozen=frozen)
        depths = torch.arange(config.depths, device=outputs.device, dtype=sums[0].dtype)
        return losses.weighted_output(config.decay**depths, *sums)

    def train_logits(self, batch: TrainBatch, depth: int) -> list[Tensor]:
        """Logits [B, T, V'] of depths 1..depth with no anchor dropped; see the contract."""
        outputs = self._parallel(batch, AnchoredRows.everywhere(batch, depth))
        return [self.logits(output) for output in outputs]

    # Drafting

    def start(self, seen: TargetStates, tree: DraftShape, capacity: int) -> State:
        (batch, width), plan = seen.tokens.shape, self.plans.of(tree)
        slots = max(capacity, width) + plan.max_depth + 1
        caches = [layer.self_attn.new_cache(batch, slots) for layer in self._layers]
        output = caches[0].new_zeros(batch, plan.max_depth, self.info.hidden_size)
        self.set_columns()
        return self.commit(State.empty(seen, plan, output, caches), seen)

    def commit(self, state: State, accepted: TargetStates) -> State:
        """One pass over the accepted run and the mask rows behind it.

        Mask rows overwrite padded entries, or stand before them.
        """
        assert accepted.taps is not None, "peagle needs the target's taps"
        (rows, last), (batch, width) = state.advance(accepted), accepted.tokens.shape
        masks = torch.arange(state.plan.max_depth - 1, device=rows.device)
        true = self.fuse(accepted.taps)
        masked_embedding, masked = self._unknown(batch, masks.shape[0])
        embedded = self.embed(accepted.next_tokens, true.dtype)
        embedded, states = torch.cat([embedded, masked_embedding], 1), torch.cat([true, masked], 1)
        # [B, W + E], positions as well
        slots = torch.cat([run_slots(accepted), state.root_position[:, None] + masks], 1)
        cosine, sine = look_up(state.rotations(self._rope), slots)
        sight = UpTo.run(slots)
        wanted = torch.cat([last, (width + masks).expand(batch, -1)], 1)
        for index, layer in enumerate(self._layers):
            read = self._read(index, embedded, states)
            states = self.residual(layer, states)
            key, value = layer.self_attn.key_value(read, (cosine, sine))
            # mask rows last: they share slots with padding
            for span in (slice(0, width), slice(width, None)):
                state.store(index, rows, slots[:, span], key[:, span], value[:, span])
            if index == len(self.layers) - 1:  # only rows that predict go on
                read, states, cosine, sine = (
                    part[rows, wanted] for part in (read, states, cosine, sine)
                )
                sight = UpTo.run(slots, wanted)
            query = layer.self_attn.query(read, (cosine, sine))
            states = layer.finish(states, state.attend(index, query, sight))
        state.output.copy_(self.norm(states))
        return state

    def propose(self, state: State, noise: Noise) -> Proposal:
        """From what `commit` computed; a node's token depends on its depth and rank alone."""
        return fill(state, self.logits(state.output), noise, self.columns)
