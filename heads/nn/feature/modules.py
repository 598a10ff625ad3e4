"""Own modules per depth, each reading the output of the one before (DeepSeek-V3's MTP).

Module k at row s joins the state h^{k-1}_s of the module before it (the target's own for k = 1)
with the token at s+k and predicts token s+k+1; it attends to its own rows up to s. Counted by the
token that is read, all modules work on the same column: in column t (token t+1), module k reads the
output of module k-1 in column t-1, or the target's state at t for k = 1. So a column needs only the
token it reads and the column before it, and drafting is exact: every module computes committed
columns from committed tokens alone, and a drafted node runs the modules beyond its depth on their
outputs at its parent. Module k has no state to read in the first k-1 columns of a document; it
reads zeros there, both in training and in drafting.

Legend: B rows, T positions, D modules, E modules in use (at most the draft's depth), H hidden, V
vocabulary, S cache slots, W width of a committed run, P nodes run at one level, g key/value heads,
d head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from heads.api.batch import TrainBatch
from heads.api.drafter import Noise, Proposal, TargetStates
from heads.nn.attention import sequence_attention
from heads.nn.blocks import Attend, Attention
from heads.nn.drafting.growth import grow
from heads.nn.drafting.places import CachePlace, Memory
from heads.nn.drafting.plan import Plan
from heads.nn.drafting.state import Cached, run_slots
from heads.nn.feature.base import FeatureDrafter
from heads.nn.packing import Packing
from heads.nn.rope import Rope, Rotation


class Module(Protocol):
    """One depth: a projection of state and embedding, a decoder layer and a final norm."""

    @property
    def attention(self) -> Attention: ...

    def run(self, embedded: Tensor, state: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        """Embeddings and states [B, T, H] -> normalised outputs [B, T, H]."""
        ...


class ModuleChain:
    """Training and drafting of a row of modules."""

    def __init__(self, owner: FeatureDrafter, modules: Sequence[Module], rope: Rope) -> None:
        self.owner, self.modules, self.rope = owner, modules, rope

    def unroll(self, batch: TrainBatch, depth: int) -> list[Tensor]:
        """Normalised outputs [B, T, H] of modules 1..`depth`, predicting t+2, t+3, ..."""
        assert batch.last_hidden is not None, "mtp needs the target's last hidden state"
        state = batch.last_hidden.to(self.modules[0].attention.o_proj.weight.dtype)
        # The last column of a document reads the next one's first token; it is neither supervised
        # nor attended to.
        embedded = self.owner.embed(batch.tokens.roll(-1, 1), state.dtype)
        rotation = self.rope.at(batch.positions, state.dtype)
        is_first = (batch.positions == 0)[..., None]
        attend: Attend = partial(sequence_attention, packing=Packing.of(batch))
        found = []
        for number, module in enumerate(self.modules[:depth]):
            output = module.run(embedded, state, rotation, attend)
            found.append(output.roll(-number, 1))
            state = output.roll(1, 1).masked_fill(is_first, 0.0)
        return found

    def start(self, seen: TargetStates, plan: Plan, capacity: int) -> Cached:
        """State after prefill. Its output [B, 1, E, H] is that of each module in the last
        column."""
        (batch, width), used = seen.tokens.shape, self.modules[: plan.max_depth]
        slots = max(capacity, width) + plan.room + 1
        caches = [module.attention.new_cache(batch, slots) for module in used]
        width = self.modules[0].attention.o_proj.out_features
        output = caches[0].new_zeros(batch, 1, len(used), width)
        return self.commit(Cached.empty(seen, plan, output, caches), seen)

    def commit(self, state: Cached, accepted: TargetStates) -> Cached:
        """Run all modules in use over the run, on the true states or the output before them.

        Padded columns are written after the run and overwritten before anything reads them.
        """
        assert accepted.last_hidden is not None, "mtp needs the target's last hidden state"
        rows, last = state.advance(accepted)
        states = accepted.last_hidden.to(state.output.dtype)
        embedded = self.owner.embed(accepted.next_tokens, states.dtype)
        place = CachePlace.run(run_slots(accepted), state.rotations(self.rope))
        at_last = []
        for index in range(len(state.keys)):
            output = self._run(state, index, embedded, states, place, rows)
            at_last.append(output[rows, last])
            states = torch.cat([state.output[:, :, index], output[:, :-1]], 1)
        state.output.copy_(torch.stack(at_last, 2))
        return state

    def propose(self, state: Cached, noise: Noise, columns: Tensor | None = None) -> Proposal:
        """Grow level by level; nodes at depth j run modules j+1 and on. See the protocol."""
        rows = state.rows
        memory = Memory(state.root_position, state.rotations(self.rope))
        depth = 0

        def step(place: CachePlace, tokens: Tensor, carry: Tensor) -> tuple[Tensor, Tensor]:
            nonlocal depth
            depth += 1
            # carry [B, P, E-j+1, H]: the outputs of modules j..E at the nodes' parents, which
            # modules j+1..E read here.
            embedded = self.owner.embed(tokens, carry.dtype)
            outputs = [
                self._run(state, index, embedded, carry[:, :, index - depth], place, rows)
                for index in range(depth, len(state.keys))
            ]
            return self.owner.target.project(outputs[0]), torch.stack(outputs, 2)

        logits = self.owner.target.project(state.output[:, :, 0])
        return grow(state, logits, state.output, step, noise, columns, memory)

    def _run(
        self,
        state: Cached,
        index: int,
        embedded: Tensor,
        states: Tensor,
        place: CachePlace,
        rows: Tensor,
    ) -> Tensor:
        """Module `index` (0-based) over its cache at `place` -> normalised outputs [B, P, H]."""

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            state.store(index, rows, place.slots, key, value)
            return state.attend(index, query, place.sight)

        return self.modules[index].run(embedded, states, place.rotation, attend)
