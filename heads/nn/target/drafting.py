"""Drafting with the target's own layers: the part that every self-speculative kind shares.

A drafter of this type keeps some of the target's layers and has its own key/value cache for them.
Tokens that the target has read enter that cache from the TRUE residual streams: layer i reads tap
i, and its norm and its key and value projections give exactly what the target's own cache holds.
Only drafted tokens and the root, whose states the target has yet to compute, run through the kept
layers; their cache entries are replaced as soon as they are committed. If all layers are kept and
nothing is quantised, the drafts are the target's own picks.

Training uses the same context: step k of a chain reads the true keys of all positions up to t and
the chain's own keys after them (`heads.nn.attention.chained_attention`).

Legend: B rows, T positions, W width of a run, P nodes run at one level, H hidden, V vocabulary, S
cache slots, n taps, L blocks that attend, g key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from heads.api.batch import TrainBatch
from heads.api.drafter import Noise, Proposal, TargetStates, TrainableDrafter
from heads.api.errors import UserError
from heads.api.target_info import TargetInfo, TargetWeights
from heads.api.tree import DraftShape
from heads.nn.attention import chained_attention
from heads.nn.drafting.growth import grow
from heads.nn.drafting.places import CachePlace, Memory
from heads.nn.drafting.plan import PlanCache
from heads.nn.drafting.state import Cached as State
from heads.nn.drafting.state import run_slots
from heads.nn.packing import Packing
from heads.nn.rope import Rope, look_up
from heads.nn.target import layers
from heads.nn.target.layers import DraftLayer, KeptLayer, MakeProduct, shared_linear


class LayerDrafter(TrainableDrafter):
    """Base of the kinds that draft with the target's layers: references to them, and caches that
    hold the true keys and values of committed tokens.

    A kind sets `needs` so that its taps hold every kept layer's number. It may add its own blocks
    after the target's (`_own_blocks`) and replace what follows them (`_normalise`, `_logits`).
    """

    def __init__(self, config: object, info: TargetInfo, kept: tuple[KeptLayer, ...]) -> None:
        super().__init__(config, info)
        layers.require_family(self.kind, info)
        self.kept = kept
        self._rope = Rope(info.head_dim, info.rope_theta)
        self._plans = PlanCache()
        self._final_norm = torch.empty(0)
        self._blocks: list[DraftLayer] = []
        # per block that attends: where its input stands among the taps
        self._sources: list[int] = []

    def bind(self, weights: TargetWeights) -> None:
        """Refer to the target's embedding, kept layers, final norm and LM head."""
        super().bind(weights)
        self._rope.follow(weights.rotary)
        final_norm = weights.state.get("model.norm.weight")
        if final_norm is None:
            raise UserError(
                f"kind '{self.kind}' cannot run layers of target '{self.info.id}' "
                f"({self.info.model_type}): it has no model.norm.weight. Choose another kind with "
                "head=."
            )
        self._final_norm = final_norm.detach()
        maker, own = self._maker(weights), self._own_blocks()
        kept = layers.read_layers(self.kind, self.info, weights, self.kept, maker)
        self._blocks = [*kept, *(block for block, _ in own)]
        inputs = [item.layer for item in self.kept if item.attention] + [tap for _, tap in own]
        self._sources = [self.needs.taps.index(tap) for tap in inputs]

    def _maker(self, weights: TargetWeights) -> MakeProduct:
        """How products with the target's weights are made."""
        return shared_linear

    def _own_blocks(self) -> Sequence[tuple[DraftLayer, int]]:
        """Attending blocks behind the target's, each with the tap that is its committed input."""
        return ()

    # The network

    @property
    def _attending(self) -> list[DraftLayer]:
        return [block for block in self._blocks if block.attends]

    def _normalise(self, states: Tensor) -> Tensor:
        """The last block's output [..., H] -> the LM head's input."""
        return layers.rms_norm(states, self._final_norm, self.info.rms_norm_eps)

    def _logits(self, normed: Tensor) -> Tensor:
        """Normalised states [..., H] -> logits [..., V]."""
        return self.target.project(normed)

    def _true_pairs(self, batch: TrainBatch) -> list[tuple[Tensor, Tensor]]:
        """Per attending block, the keys and values [B, T, g, D] that the target's own cache would
        hold of a batch."""
        assert batch.taps is not None, f"kind '{self.kind}' needs the target's taps"
        rotation = self._rope.at(batch.positions, self.target.embedding.dtype)
        return [
            block.key_value(batch.taps[:, :, source], rotation)
            for block, source in zip(self._attending, self._sources, strict=True)
        ]

    # Drafting

    def _new_state(
        self, seen: TargetStates, tree: DraftShape, capacity: int, outputs: int
    ) -> State:
        """A state before any run, with room for `outputs` [B, Q, H] of the last commit."""
        (batch, width), plan = seen.tokens.shape, self._plans.of(tree)
        shape, like = (batch, max(capacity, width) + plan.room + 2), self.target.embedding
        caches = [
            like.new_zeros(*shape, *block.cache_shape, dtype=block.dtype)
            for block in self._attending
        ]
        dtype = self._blocks[-1].dtype
        output = like.new_zeros(batch, outputs, self.info.hidden_size, dtype=dtype)
        return State.empty(seen, plan, output, caches)

    def _store(self, state: State, accepted: TargetStates) -> None:
        """Move past a committed run, with keys and values from its true states.

        Padded entries are written after the run and overwritten before anything reads them.
        """
        assert accepted.taps is not None, f"kind '{self.kind}' needs the target's taps"
        (rows, _), slots = state.advance(accepted), run_slots(accepted)
        rotation = look_up(self._table(state), slots)
        for index, block in enumerate(self._attending):
            true = accepted.taps[:, :, self._sources[index]]
            state.store(index, rows, slots, *block.key_value(true, rotation))

    def _chain(self, state: State, positions: Tensor) -> CachePlace:
        """The place of consecutive tokens at positions [B, W]."""
        return CachePlace.run(positions, self._table(state))

    def _run(
        self, state: State, states: Tensor, place: CachePlace, blocks: Sequence[DraftLayer]
    ) -> Tensor:
        """Embeddings [B, P, H] through `blocks` and the cache -> the LM head's input."""
        rows, number = state.rows, 0
        for block in blocks:
            attended = None
            if block.attends:
                query, key, value = block.project(states, place.rotation)
                state.store(number, rows, place.slots, key, value)
                attended = state.attend(number, query, place.sight, block.window)
                number += 1
            states = block.finish(states, attended)
        return self._normalise(states)

    def _table(self, state: State) -> Tensor:
        like = self.target.embedding
        return self._rope.table(state.slots, like.device, like.dtype)


class SelfDrafter(LayerDrafter):
    """Base of the kinds that draft token by token with the target's layers; also a `Reader`."""

    # Training

    def _unroll(self, batch: TrainBatch, steps: int) -> list[Tensor]:
        """The LM head's input at steps 1..`steps` of a chain, [B, T, H] each: step k at row t reads
        the true states up to t and the true tokens up to t+k, and predicts token t+k+1."""
        table_dtype, pairs = self.target.embedding.dtype, self._true_pairs(batch)
        keys, values = [[key] for key, _ in pairs], [[value] for _, value in pairs]
        packing = Packing.of(batch)
        outputs = []
        for step in range(1, steps + 1):
            # The last rows have no token this far ahead; no position is supervised for what they
            # read.
            states = self.target.embed(batch.tokens.roll(-step, 1))
            rotation, place = self._rope.at(batch.positions + step, table_dtype), 0
            for block in self._blocks:
                attended = None
                if block.attends:
                    query, key, value = block.project(states, rotation)
                    keys[place].append(key)
                    values[place].append(value)
                    # true rows that are within the window of a token `step` behind the last
                    limit = max(0, block.window - step) if block.window else None
                    attended = chained_attention(query, keys[place], values[place], packing, limit)
                    place += 1
                states = block.finish(states, attended)
            outputs.append(self._normalise(states))
        return outputs

    def train_logits(self, batch: TrainBatch, depth: int) -> list[Tensor]:
        """Logits [B, T, V] of unrolled steps 1..depth; see the contract."""
        return [self._logits(output) for output in self._unroll(batch, depth)]

    # Drafting

    def start(self, seen: TargetStates, tree: DraftShape, capacity: int) -> State:
        return self.commit(self._new_state(seen, tree, capacity, 1), seen)

    def commit(self, state: State, accepted: TargetStates) -> State:
        """Store keys and values of the run from its true states, then run the root."""
        self._store(state, accepted)
        at_root = self._chain(state, state.root_position[:, None])
        state.output.copy_(self._read(state, state.root[:, None], at_root))
        return state

    def propose(self, state: State, noise: Noise) -> Proposal:
        memory = Memory(state.root_position + 1, self._table(state))

        def step(place: CachePlace, tokens: Tensor, carry: Tensor) -> tuple[Tensor, Tensor]:
            output = self._read(state, tokens, place)
            return self._logits(output), output

        return grow(state, self._logits(state.output), state.output, step, noise, memory=memory)

    def root_logits(self, state: State) -> Tensor:
        """Logits [B, V] of the token after the root; see `Reader`."""
        return self._logits(state.output)[:, 0]

    def read(self, state: State, tokens: Tensor, offset: Tensor) -> Tensor:
        """Run tokens [B, W], `offset` [B] behind the root -> logits [B, W, V]; see `Reader`."""
        first = (state.root_position + 1 + offset)[:, None]
        chain = self._chain(state, first + torch.arange(tokens.shape[1], device=tokens.device))
        return self._logits(self._read(state, tokens, chain))

    def _read(self, state: State, tokens: Tensor, place: CachePlace) -> Tensor:
        """Tokens [B, P] through all blocks and the cache -> the LM head's input [B, P, H]."""
        return self._run(state, self.target.embed(tokens), place, self._blocks)
