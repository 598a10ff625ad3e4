"""A small language model as a drafter, which reads tokens only.

Kinds built on it add an objective (`heads/distilled.py`) or another way to draft (`heads/pard.py`).
Parameter names are Hugging Face's for Llama, so an export is an ordinary checkpoint. It is also a
`Reader`: another drafter may speed it up (`heads/cascade.py`).

Legend: B rows, T positions, H hidden of the drafter, V vocabulary, L layers, S cache slots, W width
of a run, P tokens run together, Q of them whose outputs are wanted, g key/value heads, D head size.
"""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from heads.api.batch import TrainBatch
from heads.api.checkpoint import unset_parameters
from heads.api.drafter import Noise, Proposal, TargetStates, TrainableDrafter
from heads.api.errors import UserError
from heads.api.target_info import TargetInfo, TargetWeights
from heads.api.tree import DraftShape
from heads.nn import init
from heads.nn.attention import sequence_attention
from heads.nn.blocks import Attend, DecoderLayer, LayerShape, RMSNorm, initialise_blocks
from heads.nn.drafting.growth import grow
from heads.nn.drafting.places import CachePlace, Memory
from heads.nn.drafting.plan import Plan, PlanCache
from heads.nn.drafting.sight import Sight, UpTo
from heads.nn.drafting.state import Cached as State
from heads.nn.matrices import set_matrix
from heads.nn.packing import Packing
from heads.nn.rope import Rope, Rotation, look_up
from heads.nn.small_lm.config import NetworkConfig, layer_shape, scaled_frequencies
from heads.nn.small_lm.source import copy_target_layers, fill_from, resolve


class Backbone(nn.Module):
    """Embedding, decoder layers and final norm, under Hugging Face's names."""

    def __init__(self, layers: int, shape: LayerShape, vocab_size: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab_size, shape.hidden_size) if vocab_size else None
        self.layers = nn.ModuleList([DecoderLayer(shape) for _ in range(layers)])
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)


class SmallLM(TrainableDrafter):
    """A separate Llama that drafts token by token. Its configuration: `NetworkConfig`."""

    def __init__(self, config: Any, info: TargetInfo) -> None:
        assert isinstance(config, NetworkConfig)
        self.source, config = resolve(config, info)
        super().__init__(config, info)
        self.shape = layer_shape(config, info)
        if config.share_embeddings and self.shape.hidden_size != info.hidden_size:
            raise UserError(
                f"head.share_embeddings needs the target's hidden_size {info.hidden_size}; "
                f"given {self.shape.hidden_size}."
            )
        layers = len(config.from_target_layers) or config.num_layers
        self.model = Backbone(layers, self.shape, 0 if config.share_embeddings else info.vocab_size)
        own_head = not config.share_embeddings and not config.tie_embeddings
        sizes = self.shape.hidden_size, info.vocab_size
        self.lm_head = nn.Linear(*sizes, bias=False) if own_head else None
        if self.lm_head is not None:
            set_matrix(self.lm_head.weight, False)
        self._rope = Rope(self.shape.head_dim, config.rope_theta or info.rope_theta)
        if config.rope_scaling:
            self._rope.follow(
                scaled_frequencies(self._rope.theta, self.shape.head_dim, config.rope_scaling)
            )
        self._plans = PlanCache(self.one_pass)
        unset_parameters(self)

    def bind(self, weights: TargetWeights) -> None:
        """See `TrainableDrafter`; copied layers rotate as the target's do."""
        super().bind(weights)
        if self.config.from_target_layers:
            self._rope.follow(weights.rotary)

    def initialise(self, weights: TargetWeights, generator: torch.Generator) -> None:
        """A random Llama, the chosen layers of the target, or the model in `from_model`; raises
        `UserError` if there are no such weights."""
        if self.source is not None:
            fill_from(self, self.source, self.info)
        elif self.config.from_target_layers:
            copy_target_layers(self, self.config.from_target_layers, self.info, weights)
        else:
            initialise_blocks(self, generator)
            if self.model.embed_tokens is not None:
                std = 0.02 if self.lm_head is None else 1.0
                init.normal(self.model.embed_tokens.weight, std, generator)

    # The network

    def embed(self, tokens: Tensor) -> Tensor:
        """Embeddings [..., H] of tokens [...]."""
        if self.model.embed_tokens is not None:
            return cast(Tensor, self.model.embed_tokens(tokens))
        return self.target.embed(tokens, self.model.norm.weight.dtype)

    def logits(self, states: Tensor) -> Tensor:
        """Normalised states [..., H] -> logits [..., V]."""
        if self.lm_head is not None:
            return cast(Tensor, self.lm_head(states))
        if self.model.embed_tokens is not None:
            return F.linear(states, self.model.embed_tokens.weight)
        return self.target.project(states)

    def sequence(self, batch: TrainBatch) -> Tensor:
        """Normalised states [B, T, H] of packed sequences; the one at t predicts token t+1."""
        attend: Attend = partial(sequence_attention, packing=Packing.of(batch))
        return self._run(batch.tokens, batch.positions, attend)

    def _run(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Normalised states [B, T, H] of tokens [B, T] at `positions`."""
        states = self.embed(tokens)
        rotation = self._rope.at(positions, states.dtype)
        for layer in self.model.layers:
            states = layer(states, rotation, attend)
        return cast(Tensor, self.model.norm(states))

    def train_logits(self, batch: TrainBatch, depth: int) -> list[Tensor]:
        """Depth k at t is the prediction from token t+k [B, T, V]; past the end none."""
        logits = self.logits(self.sequence(batch))
        return [logits.roll(-k, 1) for k in range(1, depth + 1)]

    # Drafting

    def start(self, seen: TargetStates, tree: DraftShape, capacity: int) -> State:
        (batch, width), plan = seen.tokens.shape, self._plans.of(tree)
        slots = max(capacity, width) + plan.room + 2
        layers = cast(list[DecoderLayer], list(self.model.layers))
        caches = [layer.self_attn.new_cache(batch, slots) for layer in layers]
        output = caches[0].new_zeros(batch, self.outputs(plan), self.shape.hidden_size)
        tokens = torch.cat([seen.tokens[:, :1], seen.next_tokens], 1)
        state = State.empty(seen, plan, output, caches)
        return self.absorb(state, seen, tokens, seen.positions[:, :1])

    def outputs(self, plan: Plan) -> int:
        """Outputs [B, Q, H] that a state keeps per row: the normalised state at the root alone."""
        return 1

    def commit(self, state: State, accepted: TargetStates) -> State:
        """Read the newly committed tokens; the last one's output predicts the root's children."""
        return self.absorb(state, accepted, accepted.next_tokens, accepted.positions[:, :1] + 1)

    def absorb(self, state: State, run: TargetStates, tokens: Tensor, first: Tensor) -> State:
        """Run `tokens` [B, W] at positions first [B, 1] and on, and keep the root's output.

        Padded tokens are written after the root and overwritten before anything reads them.
        """
        state.advance(run)
        slots = first + torch.arange(tokens.shape[1], device=tokens.device)
        state.output.copy_(self.run(state, tokens, slots, state.root_position[:, None] - first))
        return state

    def run(
        self, state: State, tokens: Tensor, slots: Tensor, wanted: Tensor | None = None
    ) -> Tensor:
        """Run tokens [B, P] at positions `slots` [B, P], where each sees everything up to itself,
        and keep their keys and values -> normalised states [B, Q, H] of the places `wanted` [B, Q]
        among them (all: None)."""
        rotation = look_up(state.rotations(self._rope), slots)
        states, count, sight = self.embed(tokens), len(self.model.layers), UpTo.run(slots)
        rows = state.rows
        for index in range(count if wanted is None else count - 1):
            states = self._layer(state, index, states, rotation, rows, slots, sight)
        # after the last layer's keys and values, nothing needs the other states
        if wanted is not None:
            last = UpTo.run(slots, wanted), (rows, wanted)
            states = self._layer(state, -1, states, rotation, rows, slots, *last)
        return cast(Tensor, self.model.norm(states))

    def _layer(
        self,
        state: State,
        index: int,
        states: Tensor,
        rotation: Rotation,
        rows: Tensor,
        slots: Tensor,
        sight: Sight,
        only: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """One layer over the cache: keys and values of all P states, the rest for `only`."""
        layer = cast(DecoderLayer, self.model.layers[index])
        normed = layer.input_layernorm(states)
        state.store(index, rows, slots, *layer.self_attn.key_value(normed, rotation))
        if only is not None:
            states, normed = states[only], normed[only]
            rotation = rotation[0][only], rotation[1][only]
        query = layer.self_attn.query(normed, rotation)
        return layer.finish(states, state.attend(index, query, sight))

    def propose(self, state: State, noise: Noise) -> Proposal:
        """Grow the tree level by level from the root's output; see the protocol."""
        rows = state.rows
        memory = Memory(state.root_position + 1, state.rotations(self._rope))

        def step(place: CachePlace, tokens: Tensor, carry: Tensor) -> tuple[Tensor, Tensor]:
            states = self.embed(tokens)
            at = place.rotation, rows, place.slots, place.sight
            for index in range(len(self.model.layers)):
                states = self._layer(state, index, states, *at)
            states = self.model.norm(states)
            return self.logits(states), states

        return grow(state, self.logits(state.output), state.output, step, noise, memory=memory)

    def root_logits(self, state: State) -> Tensor:
        """Logits [B, V] of the token after the root; see `Reader`."""
        return self.logits(state.output[:, 0])

    def read(self, state: State, tokens: Tensor, offset: Tensor) -> Tensor:
        """Run tokens [B, W] as a chain at `offset` [B] -> logits [B, W, V]; see `Reader`."""
        first = (state.root_position + 1 + offset)[:, None]
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.logits(self.run(state, tokens, first + places))
