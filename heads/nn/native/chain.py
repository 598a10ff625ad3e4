"""`heads.nn.feature.chain` for a layer that is run as a whole and passes its queries, keys and
values to a function: committed rows run the whole layer, not only its keys and values.

Legend: B rows, T positions, K steps, H hidden, S cache slots, W width of a committed run, P nodes
run at one level, h query heads, g key/value heads, D and E numbers per key and value.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from heads.api.batch import TrainBatch
from heads.api.drafter import Noise, Proposal, TargetStates
from heads.nn.attention import chained_attention
from heads.nn.blocks import Attend
from heads.nn.checkpointing import network_part
from heads.nn.drafting.growth import grow
from heads.nn.drafting.places import CachePlace, Memory
from heads.nn.drafting.plan import Plan
from heads.nn.drafting.state import Cached, run_slots
from heads.nn.packing import Packing
from heads.nn.rope import Rope, Rotation


class WholeLayer(Protocol):
    """The methods that a kind gives to `LayerChain`."""

    def features(self, taps: Tensor | None, last_hidden: Tensor | None) -> Tensor:
        """The target's states -> features [B, T, H]."""
        ...

    def run(self, tokens: Tensor, feature: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        """Tokens [B, T], features [B, T, H] -> outputs [B, T, H], for the LM head and the next
        step."""
        ...

    def new_caches(self, rows: int, slots: int) -> tuple[Tensor, Tensor]:
        """Zeros [rows, slots, g, D] for keys and [rows, slots, g, E] for values."""
        ...

    def logits(self, emitted: Tensor) -> Tensor:
        """Outputs [..., H] -> logits [..., V]."""
        ...


class LayerChain:
    """Training and drafting of one layer that is applied repeatedly."""

    def __init__(self, network: WholeLayer, rope: Rope) -> None:
        self.network, self.rope = network, rope

    def unroll(self, batch: TrainBatch, steps: int) -> list[Tensor]:
        """Outputs [B, T, H] of steps k = 1..`steps`, which predict token t+k+1 at t."""
        packing = Packing.of(batch)
        feature = self.network.features(batch.taps, batch.last_hidden)
        keys: tuple[Tensor, ...] = ()
        values: tuple[Tensor, ...] = ()
        outputs = []
        for step in range(steps):
            # The last rows have no token this far ahead; they are neither supervised nor attended
            # to.
            tokens, positions = batch.tokens.roll(-(step + 1), 1), batch.positions + step
            rotation = self.rope.at(positions, feature.dtype)
            feature, *own = self._unrolled(tokens, rotation, feature, keys, values, packing)
            keys, values = (*keys, own[0]), (*values, own[1])
            outputs.append(feature)
        return outputs

    @network_part
    def _unrolled(
        self,
        tokens: Tensor,
        rotation: Rotation,
        feature: Tensor,
        keys: tuple[Tensor, ...],
        values: tuple[Tensor, ...],
        packing: Packing,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """One step after `keys` and `values` -> its output, key and value."""
        own: list[Tensor] = []

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            own.extend((key, value))
            return chained_attention(query, [*keys, key], [*values, value], packing)

        output = self.network.run(tokens, feature, rotation, attend)
        return output, own[0], own[1]

    def start(self, seen: TargetStates, plan: Plan, capacity: int) -> Cached:
        batch, width = seen.tokens.shape
        keys, values = self.network.new_caches(batch, max(capacity, width) + plan.room + 1)
        hidden = self.network.features(seen.taps, seen.last_hidden).shape[-1]
        output = keys.new_zeros(batch, 1, hidden)
        return self.commit(Cached.empty(seen, plan, output, [keys], [values]), seen)

    def commit(self, state: Cached, accepted: TargetStates) -> Cached:
        """Run a committed run. Padded entries are written after it and overwritten before anything
        reads them."""
        rows, last = state.advance(accepted)
        features = self.network.features(accepted.taps, accepted.last_hidden)
        place = CachePlace.run(run_slots(accepted), state.rotations(self.rope))
        output = self._run(state, place, rows, accepted.next_tokens, features)
        state.output.copy_(output[rows, last])
        return state

    def propose(self, state: Cached, noise: Noise, columns: Tensor | None = None) -> Proposal:
        """Grow the draft level by level from the last committed row's output; see the protocol."""
        rows = state.rows
        memory = Memory(state.root_position, state.rotations(self.rope))

        def step(place: CachePlace, tokens: Tensor, feature: Tensor) -> tuple[Tensor, Tensor]:
            output = self._run(state, place, rows, tokens, feature)
            return self.network.logits(output), output

        first = self.network.logits(state.output)
        return grow(state, first, state.output, step, noise, columns, memory)

    def _run(
        self, state: Cached, place: CachePlace, rows: Tensor, tokens: Tensor, feature: Tensor
    ) -> Tensor:
        """The layer over its cache at `place` -> outputs [B, P, H]."""

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            state.store(0, rows, place.slots, key, value)
            return state.attend(0, query, place.sight)

        return self.network.run(tokens, feature, place.rotation, attend)
