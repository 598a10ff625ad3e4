"""Drafting with the target's own layers: the part that every self-speculative kind shares.

A drafter of this sort keeps some of the target's layers and has a key/value cache of its own for
them. What the target has read enters that cache from the TRUE residual streams: layer i reads tap
i, and its norm and its key and value projections give just what the target's own cache holds. So
only drafted tokens and the root, whose states the target has yet to compute, run through the kept
layers; what they left in the cache is replaced as soon as they are committed. With all layers kept
and nothing quantised the drafts are the target's own picks.

Training sees the same thing: step k of a chain reads the true keys of all positions up to t and the
chain's own keys behind them (`heads.nn.attention.chained_attention`).

Legend: B rows, T positions, W width of a run, P nodes run at one level, H hidden, V vocabulary, S
cache slots, n taps, L blocks that attend, g key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from heads.api.batch import TrainBatch
from heads.api.drafter import Noise, Proposal, TargetStates, TrainableDrafter
from heads.api.errors import UserError
from heads.api.target_info import TargetInfo, TargetWeights
from heads.api.tree import DraftShape
from heads.nn.attention import (
    CachePlace,
    Memory,
    additive,
    cache_attention,
    chained_attention,
    packed_mask,
    write_cache,
)
from heads.nn.drafting.growth import grow
from heads.nn.drafting.plan import Plan, PlanCache, last_valid
from heads.nn.rope import Rope, Rotation, look_up
from heads.nn.target.layers import (
    DraftLayer,
    KeptLayer,
    MakeProduct,
    SharedLinear,
    read_layers,
    require_family,
    rms_norm,
)


@dataclass
class State:
    """keys, values: per block that attends [B, S, g, D], slot = position: behind what is committed
    come the root and room for drafted nodes. output [B, 1, H]: what enters the LM head at the root.
    root, root_position [B] int64.
    """

    keys: list[Tensor]
    values: list[Tensor]
    output: Tensor
    root: Tensor
    root_position: Tensor
    plan: Plan


@dataclass(frozen=True)
class Queries:
    """Where tokens that are run stand: positions [B, P], cache slots [B, P], rotation of the
    positions, and mask [B, P, S], additive: what they see, windows aside.
    """

    positions: Tensor
    slots: Tensor
    rotation: Rotation
    mask: Tensor


class SelfDrafter(TrainableDrafter):
    """Base of the kinds that draft with the target's layers; also a `Reader`
    (heads/api/drafter.py).

    A kind sets `needs` so that its taps hold every kept layer's number; it may add blocks of its
    own behind the target's (`_own_blocks`) and replace what follows them (`_normalise`, `_logits`).
    """

    def __init__(self, config: object, info: TargetInfo, kept: tuple[KeptLayer, ...]) -> None:
        super().__init__(config, info)
        require_family(self.kind, info)
        self.kept = kept
        self._rope = Rope(info.head_dim, info.rope_theta)
        self._plans = PlanCache()
        self._target: TargetWeights | None = None
        self._final_norm = torch.empty(0)
        self._blocks: list[DraftLayer] = []
        # per block that attends: where its input stands among the taps
        self._sources: list[int] = []

    def bind(self, weights: TargetWeights) -> None:
        """Refer to the target's embedding, kept layers, final norm and LM head."""
        self._target = weights
        self._rope.follow(weights.rotary)
        final_norm = weights.state.get("model.norm.weight")
        if final_norm is None:
            raise UserError(
                f"kind '{self.kind}' cannot run layers of target '{self.info.id}' "
                f"({self.info.model_type}): it has no model.norm.weight. Choose another kind with "
                "head=."
            )
        self._final_norm = final_norm.detach()
        layers = read_layers(self.kind, self.info, weights, self.kept, self._maker(weights))
        own = self._own_blocks()
        self._blocks = [*layers, *(block for block, _ in own)]
        inputs = [item.layer for item in self.kept if item.attention] + [tap for _, tap in own]
        self._sources = [self.needs.taps.index(tap) for tap in inputs]

    def _maker(self, weights: TargetWeights) -> MakeProduct:
        """How products with the target's weights are made."""
        return SharedLinear

    def _own_blocks(self) -> Sequence[tuple[DraftLayer, int]]:
        """Blocks of the drafter behind the target's, each with the tap that its input is for what
        is committed; they attend."""
        return ()

    # The network

    def _weights(self) -> TargetWeights:
        assert self._target is not None, "bind was not called"
        return self._target

    def _embed(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self._weights().embedding)

    def _normalise(self, states: Tensor) -> Tensor:
        """The last block's output [..., H] -> what enters the LM head."""
        return rms_norm(states, self._final_norm, self.info.rms_norm_eps)

    def _logits(self, normed: Tensor) -> Tensor:
        """Normalised states [..., H] -> logits [..., V]."""
        weights = self._weights()
        return weights.logits(normed.to(weights.lm_head.dtype))

    def _unroll(self, batch: TrainBatch, steps: int) -> list[Tensor]:
        """What enters the LM head at steps 1..`steps` of a chain, [B, T, H] each: step k at row t
        reads the true states up to t and the true tokens up to t+k, and predicts token t+k+1.
        """
        assert batch.taps is not None, f"kind '{self.kind}' needs the target's taps"
        table_dtype = self._weights().embedding.dtype
        rotation = self._rope.at(batch.positions, table_dtype)
        attending = [block for block in self._blocks if block.attends]
        pairs = [
            block.key_value(batch.taps[:, :, source], rotation)
            for block, source in zip(attending, self._sources, strict=True)
        ]
        keys, values = [[key] for key, _ in pairs], [[value] for _, value in pairs]
        seen = packed_mask(batch.segments)
        outputs = []
        for step in range(1, steps + 1):
            # The last rows have no token this far ahead; whatever they read is supervised by
            # nobody.
            states = self._embed(batch.tokens.roll(-step, 1))
            rotation, place = self._rope.at(batch.positions + step, table_dtype), 0
            for block in self._blocks:
                attended = None
                if block.attends:
                    query, key, value = block.project(states, rotation)
                    keys[place].append(key)
                    values[place].append(value)
                    mask = _within(seen, batch.tokens, step, block.window)
                    attended = chained_attention(query, keys[place], values[place], mask)
                    place += 1
                states = block.finish(states, attended)
            outputs.append(self._normalise(states))
        return outputs

    def train_logits(self, batch: TrainBatch, depth: int) -> list[Tensor]:
        """Logits [B, T, V] of unrolled steps 1..depth; see the contract."""
        return [self._logits(output) for output in self._unroll(batch, depth)]

    # Drafting

    def start(self, seen: TargetStates, tree: DraftShape, capacity: int) -> State:
        """State after prefill; see the protocol."""
        batch, width = seen.tokens.shape
        plan, like = self._plans.of(tree), self._weights().embedding
        slots = max(capacity, width) + plan.room + 2
        attending = [block for block in self._blocks if block.attends]
        caches = [
            [
                like.new_zeros(batch, slots, *block.cache_shape, dtype=block.dtype)
                for block in attending
            ]
            for _ in range(2)
        ]
        state = State(
            keys=caches[0],
            values=caches[1],
            output=like.new_zeros(batch, 1, self.info.hidden_size, dtype=self._blocks[-1].dtype),
            root=seen.tokens.new_zeros(batch),
            root_position=seen.tokens.new_zeros(batch),
            plan=plan,
        )
        return self.commit(state, seen)

    def commit(self, state: State, accepted: TargetStates) -> State:
        """Keys and values of the whole run from its true states; then the new root is run, which
        predicts its children.

        Padded entries are written behind the run, where the root and drafted nodes overwrite them
        before anything sees them.
        """
        assert accepted.taps is not None, f"kind '{self.kind}' needs the target's taps"
        rows, _, root, root_position = last_valid(accepted)
        slots = accepted.positions[:, :1] + torch.arange(
            accepted.tokens.shape[1], device=root.device
        )
        rotation = look_up(self._table(state), slots)
        attending = (block for block in self._blocks if block.attends)
        for index, (block, source) in enumerate(zip(attending, self._sources, strict=True)):
            key, value = block.key_value(accepted.taps[:, :, source], rotation)
            write_cache(state.keys[index], rows[:, None], slots, key)
            write_cache(state.values[index], rows[:, None], slots, value)
        state.root.copy_(root)
        state.root_position.copy_(root_position)
        at_root = self._chain(state, root_position[:, None])
        state.output.copy_(self._run(state, root[:, None], at_root))
        return state

    def propose(self, state: State, noise: Noise) -> Proposal:
        """Grow the tree level by level from the root's output; see the protocol."""
        memory = Memory(state.root_position + 1, self._table(state), state.keys[0].shape[1])
        level = 0

        def step(place: CachePlace, tokens: Tensor, carry: Tensor) -> tuple[Tensor, Tensor]:
            nonlocal level
            level += 1
            positions = (state.root_position[:, None] + level).expand_as(place.slots)
            output = self._run(
                state, tokens, Queries(positions, place.slots, place.rotation, place.mask)
            )
            return self._logits(output), output

        logits = self._logits(state.output)
        return grow(
            state.plan,
            state.root,
            state.root_position,
            logits,
            state.output,
            step,
            noise,
            memory=memory,
        )

    def root_logits(self, state: State) -> Tensor:
        """Logits [B, V] of the token after the root; see `Reader`."""
        return self._logits(state.output)[:, 0]

    def read(self, state: State, tokens: Tensor, offset: Tensor) -> Tensor:
        """Run tokens [B, W] as a chain behind the root, `offset` [B] tokens after it -> logits [B,
        W, V]; see `Reader`."""
        first = (state.root_position + 1 + offset)[:, None]
        chain = self._chain(state, first + torch.arange(tokens.shape[1], device=tokens.device))
        return self._logits(self._run(state, tokens, chain))

    def _chain(self, state: State, positions: Tensor) -> Queries:
        """Tokens at positions [B, W] that see everything up to themselves."""
        places = torch.arange(state.keys[0].shape[1], device=positions.device)
        table = self._table(state)
        mask = additive(places <= positions[..., None], table.dtype)
        return Queries(positions, positions, look_up(table, positions), mask)

    def _run(self, state: State, tokens: Tensor, queries: Queries) -> Tensor:
        """Tokens [B, P] through all blocks -> what enters the LM head [B, P, H]; their keys and
        values stay in the cache."""
        rows = torch.arange(tokens.shape[0], device=tokens.device)[:, None]
        states, place = self._embed(tokens), 0
        masks = {0: queries.mask}
        for block in self._blocks:
            attended = None
            if block.attends:
                if block.window not in masks:
                    masks[block.window] = _windowed(queries, state.root_position, block.window)
                query, key, value = block.project(states, queries.rotation)
                write_cache(state.keys[place], rows, queries.slots, key)
                write_cache(state.values[place], rows, queries.slots, value)
                mask = masks[block.window].to(query.dtype)
                attended = cache_attention(query, state.keys[place], state.values[place], mask)
                place += 1
            states = block.finish(states, attended)
        return self._normalise(states)

    def _table(self, state: State) -> Tensor:
        like = self._weights().embedding
        return self._rope.table(state.keys[0].shape[1], like.device, like.dtype)


def _windowed(queries: Queries, root_position: Tensor, window: int) -> Tensor:
    """The mask [B, P, S] without committed tokens that lie `window` positions or more back; the
    root and drafts stay visible."""
    places = torch.arange(queries.mask.shape[-1], device=queries.mask.device)
    last_hidden = torch.minimum(queries.positions - window, root_position[:, None] - 1)
    return queries.mask.masked_fill(places <= last_hidden[..., None], float("-inf"))


def _within(seen: Tensor | None, tokens: Tensor, step: int, window: int) -> Tensor | None:
    """What row t of step k sees of the true states, [B, 1, T, T] bool or None for plain causality:
    `seen`, within the window."""
    if not window:
        return seen
    numbers = torch.arange(tokens.shape[1], device=tokens.device)
    back = numbers[:, None] - numbers
    near = (back >= 0) & (back + step < window)
    return near.expand(tokens.shape[0], 1, -1, -1) if seen is None else seen & near
