"""The buffers of a batch and what runs its steps: built once for a number of rows and a capacity, used for every prompt after that.

A lane is one row: its part of the target's cache, of the drafter's state, and its counters. Prompts come and go; the buffers stay
where they are, so that a step captured as a graph can be replayed for all of them.

Legend: B rows, S slots.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from heads.api.drafter import TargetStates
from heads.api.features import FeatureSpec
from heads.api.state import write_rows
from heads.api.tree import DraftShape, TokenTree
from inference.adaptive_cost import adaptive_parts
from inference.clock import StepClock
from inference.decode import Decoder, Rows
from inference.decode_config import DecodeConfig
from inference.graphs import Pending, StepRunner
from inference.memory import tensor_bytes
from inference.noise import SharedNoise
from inference.processors import Prefix, Processors
from inference.rules.registry import get_rule
from inference.target import Seen, TargetModel


class Lanes:
    """B rows of `capacity` slots with everything that lives in them; see the module."""

    def __init__(
        self,
        target: TargetModel,
        drafter: Any,
        decode: DecodeConfig,
        tree: DraftShape,
        rows: int,
        capacity: int,
        clock: StepClock,
    ) -> None:
        self.target, self.drafter, self.decode, self.tree = target, drafter, decode, tree
        self.capacity = capacity
        self.needs = FeatureSpec() if drafter is None else drafter.needs
        self.cache = target.new_cache(rows, capacity)
        self.rule = get_rule(
            decode.rule,
            tree,
            share_noise=decode.share_noise,
            epsilon=decode.typical_epsilon,
            delta=decode.typical_delta,
        )
        self.settings = decode.sampling()
        self.processors = Processors(self.settings, target.info.vocab_size, target.device)
        history = capacity + tree.max_depth + 2 if self.settings.uses_prefix else 0
        self.rows = Rows.empty(rows, target.device, history)
        self.state: Any = None
        eos = torch.tensor(target.eos_token_ids, dtype=torch.int64, device=target.device)
        noise = self.noise(self.rows.seeds, self.rows.lengths)
        self.limits, self.lengths = adaptive_parts(target, drafter, decode, tree, rows)
        noise.keeps_logits = noise.keeps_logits or (self.limits is not None and self.limits.wants_logits)
        decoder = Decoder(
            target, drafter, tree, noise, self.rule, self.processors, self.needs, clock, eos, self.limits
        )
        self.runner = StepRunner(decoder, self.cache, self.rows, decode)

    @property
    def count(self) -> int:
        return self.rows.lengths.shape[0]

    def noise(self, seeds: Tensor, roots: Tensor) -> SharedNoise:
        """The noise of sequences with `seeds` [B] whose roots stand at `roots` [B]."""
        vocab = self.target.info.vocab_size
        return SharedNoise(self.settings, seeds, vocab, self.rule.drafts, self.rule.keeps_logits, roots)

    def step(self, longest: int, exact: bool) -> Pending:
        """Launch one verification of all rows; the host reads what came out when it wants to.

        longest: the longest row's committed tokens; or, if not `exact`, an upper bound of it.
        """
        if self.lengths is None:
            pending, self.state = self.runner.step(self.state, longest, exact)
        else:
            pending, self.state = self.runner.step(self.state, longest, exact, self.lengths.next())
        return pending

    def stop(self) -> None:
        """Deactivate every row: what an abandoned run left is not decoded further."""
        self.rows.active.zero_()

    def prefill(
        self, index: Tensor, tokens: Tensor, lengths: Tensor, seeds: Tensor, budgets: Tensor
    ) -> Tensor:
        """Read prompts into rows and pick their first tokens [R].

        index [R] rows, tokens [R, T] right-padded, lengths [R], seeds [R], budgets [R] new tokens after the first; all int64. The
        rows are inactive until `activate`.
        """
        logits, seen = self.target.prefill(
            self.cache, index, tokens, lengths, self.needs, self.decode.prefill_chunk
        )
        logits = logits[:, None]
        if self.processors.active:
            place = torch.arange(tokens.shape[0], device=tokens.device)
            last = tokens[place, lengths - 1][:, None]
            root = TokenTree.chain(0, tokens.device)
            logits = self.processors(logits, Prefix(tokens, lengths - 1, last, root))
        first = self.noise(seeds, lengths).target_pick(logits, lengths[:, None])[:, 0]
        self._start_drafter(index, tokens, lengths, first, seen)
        rows = self.rows
        rows.lengths[index], rows.root[index], rows.seeds[index], rows.budget[index] = (
            lengths,
            first,
            seeds,
            budgets,
        )
        if rows.history is not None:
            rows.history[index, : tokens.shape[1]] = tokens
            rows.history[index, lengths] = first
        return first

    def _start_drafter(
        self, index: Tensor, tokens: Tensor, lengths: Tensor, first: Tensor, seen: Seen
    ) -> None:
        """Tell the drafter about fresh prompts: at once for the whole batch, or into the rows that were refilled."""
        if self.drafter is None:
            return
        place = torch.arange(tokens.shape[1], device=tokens.device)[None]
        following = torch.cat([tokens[:, 1:], tokens[:, :1]], 1)
        following = torch.where(place == lengths[:, None] - 1, first[:, None], following)
        states = TargetStates(
            tokens, following, place.expand_as(tokens), place < lengths[:, None], seen.taps, seen.last_hidden
        )
        fresh = self.drafter.start(states, self.tree, self.capacity)
        if self.state is None:
            self.state = fresh
        else:
            write_rows(self.state, index, fresh)

    def bytes(self) -> int:
        """Bytes of the target's cache and the drafter's state."""
        return self.cache.bytes() + tensor_bytes(self.state)
