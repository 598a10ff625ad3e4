"""One layer that feeds on its own output: how it is unrolled in training and run in drafting
(EAGLE, EAGLE-3, FastMTP).

Row t reads the token at t+1 and the target's feature at t, stands at position t and predicts token
t+2. The next drafted step takes the layer's own output in the feature's place, one position on. In
training, step k sees the true rows of the first step up to its own, and its own chain of earlier
steps (EAGLE-3's training-time test, 2503.01840). HASS's harmonised context (2408.15766) is the same
thing counted from the other end: for a prediction k tokens ahead, the k-1 most recent rows are the
drafter's own and all before them the target's. In drafting, a committed row is always computed from
the target's true feature.

Legend: B rows, T positions, K steps, H hidden, V' draft vocabulary, X width of the attention's
input, n taps, S cache slots, W width of a committed run, P nodes run at one level, g key/value
heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from heads.api.batch import TrainBatch
from heads.api.drafter import Noise, Proposal, TargetStates
from heads.nn.attention import (
    CachePlace,
    Memory,
    additive,
    cache_attention,
    chained_attention,
    packed_mask,
    write_cache,
)
from heads.nn.blocks import Attention
from heads.nn.checkpointing import network_part
from heads.nn.drafting.growth import grow
from heads.nn.drafting.plan import Plan, last_valid
from heads.nn.rope import Rope, Rotation, look_up


class Network(Protocol):
    """What a kind gives to `Chain`: its layer, cut where its rows meet."""

    @property
    def attention(self) -> Attention:
        """The layer's attention."""
        ...

    def features(self, taps: Tensor | None, last_hidden: Tensor | None) -> Tensor:
        """The target's states -> features [B, T, H]."""
        ...

    def read(self, tokens: Tensor, feature: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens [B, T] and features [B, T, H] -> the attention's input [B, T, X] and the residual
        stream [B, T, H]."""
        ...

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        """The layer behind its attention -> output [B, T, H]."""
        ...

    def emit(self, output: Tensor) -> tuple[Tensor, Tensor]:
        """The output as the LM head reads it, and as the next step does."""
        ...

    def logits(self, emitted: Tensor) -> Tensor:
        """What `emit` gives to the LM head [..., H] -> logits [..., V']."""
        ...


@dataclass
class State:
    """keys, values [B, S, g, D]: row t in slot t, behind them room for drafted nodes. output [B, 1,
    H]: the layer's output at the last seen row, which predicts the root's children. root,
    root_position [B] int64.
    """

    keys: Tensor
    values: Tensor
    output: Tensor
    root: Tensor
    root_position: Tensor
    plan: Plan


class Chain:
    """Training and drafting of one recursed layer."""

    def __init__(self, network: Network, rope: Rope) -> None:
        self.network, self.rope = network, rope

    def unroll(self, batch: TrainBatch, steps: int, feature: Tensor | None = None) -> list[Tensor]:
        """What the LM head reads [B, T, H] at steps 1..`steps`; step k at row t predicts token
        t+k+1.

        feature [B, T, H]: the target's features as training shows them (with noise, for instance);
        by default as they are.
        """
        net, mask = self.network, packed_mask(batch.segments)
        if feature is None:
            feature = net.features(batch.taps, batch.last_hidden)
        keys: list[Tensor] = []
        values: list[Tensor] = []
        emitted = []
        for step in range(steps):
            # The last rows have no token this far ahead; whatever they read is supervised by nobody
            # and seen by nobody.
            tokens = batch.tokens.roll(-(step + 1), 1)
            rotation = self.rope.at(batch.positions + step, feature.dtype)
            key, value, shown, feature = self._unrolled(
                tokens, rotation, feature, tuple(keys), tuple(values), mask
            )
            keys.append(key)
            values.append(value)
            emitted.append(shown)
        return emitted

    @network_part
    def _unrolled(
        self,
        tokens: Tensor,
        rotation: Rotation,
        feature: Tensor,
        keys: tuple[Tensor, ...],
        values: tuple[Tensor, ...],
        mask: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """One step behind those that left `keys` and `values`: its own key and value, what the LM
        head reads, the next feature."""
        net = self.network
        states, residual = net.read(tokens, feature)
        key, value = net.attention.key_value(states, rotation)
        query = net.attention.query(states, rotation)
        attended = chained_attention(query, [*keys, key], [*values, value], mask)
        shown, following = net.emit(net.finish(residual, attended))
        return key, value, shown, following

    def start(self, seen: TargetStates, plan: Plan, capacity: int) -> State:
        """State after prefill; see the protocol."""
        batch, width = seen.tokens.shape
        attention = self.network.attention
        weight = attention.o_proj.weight
        slots = max(capacity, width) + plan.room + 1
        cache = (
            batch,
            slots,
            attention.k_proj.out_features // attention.head_dim,
            attention.head_dim,
        )
        state = State(
            keys=weight.new_zeros(cache),
            values=weight.new_zeros(cache),
            output=weight.new_zeros(batch, 1, attention.o_proj.out_features),
            root=seen.tokens.new_zeros(batch),
            root_position=seen.tokens.new_zeros(batch),
            plan=plan,
        )
        return self.commit(state, seen)

    def commit(self, state: State, accepted: TargetStates) -> State:
        """Keys and values of the whole run, attention and MLP of its last row only: that one
        predicts the root's children.

        Padded entries are written behind the run, where the next one overwrites them before
        anything sees them.
        """
        net = self.network
        rows, last, root, root_position = last_valid(accepted)
        states, residual = net.read(
            accepted.next_tokens, net.features(accepted.taps, accepted.last_hidden)
        )  # [B, W, X], [B, W, H]
        slots = accepted.positions[:, :1] + torch.arange(states.shape[1], device=states.device)
        rotation = look_up(self._table(state), slots)
        key, value = net.attention.key_value(states, rotation)
        row_index = rows[:, None]
        write_cache(state.keys, row_index, slots, key)
        write_cache(state.values, row_index, slots, value)
        place = last[:, None]
        own_rotation = (rotation[0][row_index, place], rotation[1][row_index, place])
        query = net.attention.query(states[row_index, place], own_rotation)
        seen = torch.arange(state.keys.shape[1], device=slots.device) < root_position[:, None, None]
        attended = cache_attention(query, state.keys, state.values, additive(seen, query.dtype))
        state.output.copy_(net.finish(residual[row_index, place], attended))
        state.root.copy_(root)
        state.root_position.copy_(root_position)
        return state

    def propose(self, state: State, noise: Noise, columns: Tensor | None = None) -> Proposal:
        """Grow the draft level by level from the last committed row's output; see the protocol.

        columns [V'] int64: target ids of the logits' columns when the draft vocabulary is reduced.
        """
        rows = torch.arange(state.root.shape[0], device=state.root.device)[:, None]
        # A node at depth d stands one position before its own token, at root_position + d - 1.
        memory = Memory(state.root_position, self._table(state), state.keys.shape[1])

        def step(place: CachePlace, tokens: Tensor, feature: Tensor) -> tuple[Tensor, Tensor]:
            return self._advance(state, place, rows, tokens, feature)

        shown, first = self.network.emit(state.output)
        logits = self.network.logits(shown)
        return grow(
            state.plan, state.root, state.root_position, logits, first, step, noise, columns, memory
        )

    def _advance(
        self, state: State, place: CachePlace, rows: Tensor, tokens: Tensor, feature: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Run nodes [B, P] (tokens, and features [B, P, H] of their parents) -> their children's
        logits and features."""
        net = self.network
        states, residual = net.read(tokens, feature)
        key, value = net.attention.key_value(states, place.rotation)
        write_cache(state.keys, rows, place.slots, key)
        write_cache(state.values, rows, place.slots, value)
        query = net.attention.query(states, place.rotation)
        attended = cache_attention(query, state.keys, state.values, place.mask)
        shown, following = net.emit(net.finish(residual, attended))
        return net.logits(shown), following

    def _table(self, state: State) -> Tensor:
        return self.rope.table(state.keys.shape[1], state.keys.device, state.keys.dtype)
