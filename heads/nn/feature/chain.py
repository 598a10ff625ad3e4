"""One layer that reads its own output: how it is unrolled in training and run in drafting (EAGLE,
EAGLE-3, FastMTP).

Row t reads the token at t+1 and the target's feature at t, has position t and predicts token t+2.
The next drafted step reads the layer's own output instead of the feature, one position on. In
training, step k sees the true rows of the first step up to its own, and its own chain of earlier
steps (EAGLE-3's training-time test, 2503.01840). HASS's harmonised context (2408.15766) is the same
context counted from the other end: for a prediction k tokens ahead, the k-1 most recent rows are
the drafter's own and all before them the target's. In drafting, a committed row is always computed
from the target's true feature. Steps after the first may be trained behind some positions only, the
anchors, because each chain is read only by its own rows.

Legend: B rows, T positions, A anchors per row, K steps, H hidden, V' draft vocabulary, X width of
the attention's input, n taps, S cache slots, W width of a committed run, P nodes run at one level,
g key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from heads.api.batch import TrainBatch
from heads.api.drafter import Noise, Proposal, TargetStates
from heads.api.tree import DraftShape
from heads.nn.attention import chained_attention
from heads.nn.blocks import Attention
from heads.nn.checkpointing import network_part
from heads.nn.drafting.growth import grow
from heads.nn.drafting.places import CachePlace, Memory
from heads.nn.drafting.plan import Plan
from heads.nn.drafting.sight import UpTo
from heads.nn.drafting.state import Cached, run_slots
from heads.nn.feature.base import FeatureDrafter
from heads.nn.feature.parallel import AnchoredRows, anchored_attention
from heads.nn.packing import Packing
from heads.nn.rope import Rope, Rotation, look_up

AttendChain = Callable[[Tensor, Sequence[Tensor], Sequence[Tensor]], Tensor]
"""(query [B, T, h, D], keys, values of all steps so far [B, T, g, D]) -> [B, T, h * D]; at A
anchors alone from the second step on."""


class Network(Protocol):
    """The methods that a kind gives to `Chain`: its layer, split at its attention."""

    @property
    def attention(self) -> Attention: ...

    def features(self, taps: Tensor | None, last_hidden: Tensor | None) -> Tensor:
        """The target's states -> features [B, T, H]."""
        ...

    def read(self, tokens: Tensor, feature: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens [B, T], features [B, T, H] -> attention's input [B, T, X], residual [B, T, H]."""
        ...

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        """The rest of the layer after its attention -> output [B, T, H]."""
        ...

    def emit(self, output: Tensor) -> tuple[Tensor, Tensor]:
        """The output as the LM head reads it, and as the next step does."""
        ...

    def logits(self, emitted: Tensor) -> Tensor:
        """The LM head's input from `emit` [..., H] -> logits [..., V']."""
        ...


class Chain:
    """Training and drafting of one layer that is applied repeatedly."""

    def __init__(self, network: Network, rope: Rope) -> None:
        self.network, self.rope = network, rope

    def unroll(
        self,
        batch: TrainBatch,
        steps: int,
        feature: Tensor | None = None,
        anchors: AnchoredRows | None = None,
    ) -> list[Tensor]:
        """The LM head's inputs [B, T, H] at steps k = 1..`steps`, which predict token t+k+1 at t.

        feature [B, T, H]: the target's features as training changes them; unchanged by default.
        anchors: positions t behind which steps from the second on are unrolled, [B, A, H] each;
        all by default.
        """
        net = self.network
        attend: AttendChain = partial(chained_attention, packing=Packing.of(batch))
        if feature is None:
            feature = net.features(batch.taps, batch.last_hidden)
        keys: list[Tensor] = []
        values: list[Tensor] = []
        emitted = []
        for step in range(steps):
            # The last rows have no token this far ahead; they are neither supervised nor attended
            # to.
            tokens, positions = batch.tokens.roll(-(step + 1), 1), batch.positions + step
            behind = anchors if step > 0 else None
            if behind is not None:
                tokens, positions = behind.at(tokens, step), behind.at(positions, step)
                if step == 1:
                    at = behind.order[..., None].expand(-1, -1, feature.shape[-1])
                    feature = feature.gather(1, at)
                    attend = partial(anchored_attention, reach=behind.reach(batch.segments))
            rotation, seen = self.rope.at(positions, feature.dtype), (tuple(keys), tuple(values))
            key, value, shown, feature = self._unrolled(tokens, rotation, feature, *seen, attend)
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
        attend: AttendChain,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """One step after `keys` and `values` -> its key, value, LM head's input, next feature."""
        net = self.network
        states, residual = net.read(tokens, feature)
        key, value = net.attention.key_value(states, rotation)
        query = net.attention.query(states, rotation)
        attended = attend(query, (*keys, key), (*values, value))
        return key, value, *net.emit(net.finish(residual, attended))

    def start(self, seen: TargetStates, plan: Plan, capacity: int) -> Cached:
        (batch, width), attention = seen.tokens.shape, self.network.attention
        cache = attention.new_cache(batch, max(capacity, width) + plan.room + 1)
        output = cache.new_zeros(batch, 1, attention.o_proj.out_features)
        return self.commit(Cached.empty(seen, plan, output, [cache]), seen)

    def commit(self, state: Cached, accepted: TargetStates) -> Cached:
        """Keys and values of the whole run; attention and MLP of its last row only.

        Padded entries are written after the run and overwritten before anything reads them.
        """
        net, attention = self.network, self.network.attention
        features = net.features(accepted.taps, accepted.last_hidden)
        states, residual = net.read(accepted.next_tokens, features)  # [B, W, X], [B, W, H]
        at, slots = state.advance(accepted), run_slots(accepted)
        attended = attend_last(attention, state, states, slots, at, self.rope)
        state.output.copy_(net.finish(residual[at], attended))
        return state

    def propose(self, state: Cached, noise: Noise, columns: Tensor | None = None) -> Proposal:
        """Grow the draft level by level from the last committed row's output; see the protocol.

        columns [V'] int64: target ids of the logits' columns when the draft vocabulary is reduced.
        """
        rows = state.rows
        # A node at depth d is one position before its own token, at root_position + d - 1.
        memory = Memory(state.root_position, state.rotations(self.rope))

        def step(place: CachePlace, tokens: Tensor, feature: Tensor) -> tuple[Tensor, Tensor]:
            return self._advance(state, place, rows, tokens, feature)

        shown, first = self.network.emit(state.output)
        return grow(state, self.network.logits(shown), first, step, noise, columns, memory)

    def _advance(
        self, state: Cached, place: CachePlace, rows: Tensor, tokens: Tensor, feature: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Run nodes (tokens [B, P], parents' features [B, P, H]) -> children's logits, features."""
        net = self.network
        states, residual = net.read(tokens, feature)
        state.store(0, rows, place.slots, *net.attention.key_value(states, place.rotation))
        attended = state.attend(0, net.attention.query(states, place.rotation), place.sight)
        shown, following = net.emit(net.finish(residual, attended))
        return net.logits(shown), following


def attend_last(
    attention: Attention,
    state: Cached,
    states: Tensor,
    slots: Tensor,
    at: tuple[Tensor, Tensor],
    rope: Rope,
) -> Tensor:
    """Store a run's keys and values in layer 0 of the cache, and attend from its last entry.

    states [B, W, X]: the attention's input at `slots` [B, W]; at: rows and places [B, 1] of the
    last entries, where the cache ends (`state.root_position`). Returns [B, 1, h * D].
    """
    cosine, sine = rotation = look_up(state.rotations(rope), slots)
    state.store(0, at[0], slots, *attention.key_value(states, rotation))
    query = attention.query(states[at], (cosine[at], sine[at]))
    return state.attend(0, query, UpTo.committed(state.root_position))


class ChainDrafter(FeatureDrafter):
    """Base of the kinds that draft with a `Chain` or an equivalent object (`chain`)."""

    chain: Any
    columns: Tensor | None = None

    def logits(self, emitted: Tensor) -> Tensor:
        """The LM head's input [..., H] -> logits [..., V'], by default from the target's own."""
        return self.target.project(emitted)

    def train_logits(self, batch: TrainBatch, depth: int) -> list[Tensor]:
        """Logits [B, T, V'] of unrolled steps 1..depth, without noise; see the contract."""
        return [self.logits(output) for output in self.chain.unroll(batch, depth)]

    def start(self, seen: TargetStates, tree: DraftShape, capacity: int) -> Any:
        return self.chain.start(seen, self.plans.of(tree), capacity)

    def propose(self, state: Any, noise: Noise) -> Proposal:
        return self.chain.propose(state, noise, self.columns)

    def commit(self, state: Any, accepted: TargetStates) -> Any:
        return self.chain.commit(state, accepted)
