"""The buffers of a batch and the runner of its steps. They are built once for a number of rows and
a capacity, and serve all prompts after that.

A lane is one row: its part of the target's cache, of the drafter's state, and its counters. Prompts
come and go; the buffers keep their addresses, so that a step captured as a graph can be replayed
for all prompts.

Legend: B rows, S slots.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from heads.api.drafter import TargetStates, TrainableDrafter
from heads.api.features import FeatureSpec
from heads.api.state import first_rows, read_rows, write_back, write_rows
from heads.api.tree import DraftShape, TokenTree
from inference.decoding.adaptive.cost import adaptive_parts
from inference.decoding.ahead import AheadDrafter
from inference.decoding.clock import StepClock
from inference.decoding.config import DecodeConfig
from inference.decoding.execution.accelerator import Pending
from inference.decoding.execution.graphs import StepRunner
from inference.decoding.placement import unwrapped
from inference.decoding.requests import Request
from inference.decoding.rules.names import sampling_rule
from inference.decoding.rules.registry import get_rule
from inference.decoding.sampling.distribution import SamplingSettings
from inference.decoding.sampling.noise import SharedNoise
from inference.decoding.sampling.processors import Prefix, Processors
from inference.decoding.sampling.row_settings import RowNoise, RowSettings
from inference.decoding.step import Decoder, Rows, StepWishes, without_early_ends
from inference.decoding.structured.grammars import Grammars
from inference.decoding.structured.rows import RowGrammars, forbid
from inference.kernels.drafter_attention import drafter_kernel
from inference.target.memory import blank_states, tensor_bytes
from inference.target.model import TargetModel
from inference.target.taps import Seen


class Lanes:
    """B rows of `capacity` slots with all their buffers; see the module.

    own_settings: every row has separate sampling settings
    (`inference.decoding.sampling.row_settings`). details: passes report what was drafted
    (`inference.decoding.pass_details`).
    """

    def __init__(
        self,
        target: TargetModel,
        drafter: Any,
        decode: DecodeConfig,
        tree: DraftShape,
        rows: int,
        capacity: int,
        clock: StepClock,
        own_settings: bool = False,
        details: bool = False,
    ) -> None:
        self.target, self.decode, self.tree, self.clock = target, decode, tree, clock
        self.capacity, self.details = capacity, details
        self.cache, vocab = target.new_cache(rows, capacity), target.info.vocab_size
        typical = {"epsilon": decode.typical_epsilon, "delta": decode.typical_delta}
        name = sampling_rule(decode.rule, decode.shape) if own_settings else decode.acceptance
        self.rule = get_rule(name, tree, share_noise=decode.share_noise, **typical)
        self.settings = decode.sampling()
        self.processors = Processors(self.settings, vocab, target.device)
        history = capacity + tree.max_depth + 2 if self.settings.uses_prefix else 0
        self.rows = Rows.empty(rows, target.device, history)
        self.state: Any = None
        self.eos = torch.tensor(target.eos_token_ids, dtype=torch.int64, device=target.device)
        self.own: RowSettings | None = None
        if own_settings:
            static = target.device.type == "cuda" or decode.compiles
            self.own = RowSettings(rows, self.settings, vocab, target.device, static)
        self.grammars = RowGrammars(rows, tree, vocab, target.device)
        self.wishes = StepWishes()
        self._work_with(drafter)

    def _work_with(self, drafter: Any) -> None:
        """Set up the runner of the steps of `drafter`; its state is not touched."""
        target, decode, tree, needs = self.target, self.decode, self.tree, FeatureSpec()
        if drafter is not None and decode.ahead:
            assert isinstance(tree, TokenTree)
            drafter = AheadDrafter(drafter, tree, target.device, self.clock, decode.ahead_threads)
        self.drafter, self.needs = drafter, needs if drafter is None else drafter.needs
        self.limits, self.lengths = adaptive_parts(target, drafter, decode, tree, self.count)
        # drafters without weights look their drafts up, or read them off the target's logits
        leads = any(isinstance(part, TrainableDrafter) for part in unwrapped(drafter))
        self.grammars.tell(self.needs.forced, leads)
        limits = self.limits
        self.keeps_logits = self.details or (limits is not None and limits.wants_logits)
        noise = self.noise(self.rows.seeds, self.rows.lengths, self.own)
        parts = target, drafter, tree, noise, self.rule, self.processors, self.needs, self.clock
        decoder = Decoder(
            *(*parts, self.eos, limits, self.details),
            exact=decode.exact,
            grammars=self.grammars,
            wishes=self.wishes,
        )
        self.runner = StepRunner(decoder, self.cache, self.rows, decode)
        self._narrow: dict[int, _Narrow] = {}
        self._arranged: tuple[int, ...] | None = None

    @property
    def count(self) -> int:
        return self.rows.lengths.shape[0]

    def noise(self, seeds: Tensor, roots: Tensor, own: RowSettings | None = None) -> SharedNoise:
        """The noise of sequences: `seeds`, `roots` (positions) [B], and the rows' settings."""
        vocab, rule = self.target.info.vocab_size, self.rule
        given = (seeds, vocab, rule.drafts, rule.keeps_logits, roots, rule.separate)
        noise = SharedNoise(self.settings, *given) if own is None else RowNoise(own, *given)
        noise.keeps_logits = noise.keeps_logits or self.keeps_logits
        return noise

    def step_rows(self, running: Sequence[int], longest: int, exact: bool) -> Pending:
        """`step` for a batch that is seldom full: it computes only the rows up to the last of
        `running`. On CUDA their number is rounded up to a power of two, so that few graphs are
        captured."""
        width = max(running) + 1
        if self.runner.compiled is not None:
            width = self.count  # every width would be compiled
        elif self.target.device.type == "cuda":
            width = min(1 << (width - 1).bit_length(), self.count)
        if width == self.count:
            self._arrange(self.own, running)
            return self.step(longest, exact)
        if width not in self._narrow:
            self._narrow[width] = self._narrowed(width)
        part = self._narrow[width]
        self._arrange(part.own, running)
        length = None if self.lengths is None else self.lengths.next()
        pending, after = part.runner.step(part.state, longest, exact, length)
        if after is not None:
            write_back(self.state, after, width)
            part.state = after
        return pending

    def _arrange(self, own: RowSettings | None, running: Sequence[int]) -> None:
        if own is not None and self._arranged != (id(own), *running):
            own.arrange(running)
            self._arranged = (id(own), *running)

    def _narrowed(self, width: int) -> _Narrow:
        """The first `width` rows as a separate batch in the same buffers."""
        rows, cache = self.rows.first(width), self.cache.first_rows(width)
        own = None if self.own is None else self.own.first(width)
        noise = self.noise(rows.seeds, rows.lengths, own)
        decoder = replace(self.runner.decoder, noise=noise)
        runner = StepRunner(decoder, cache, rows, self.decode, beside=self.runner)
        return _Narrow(runner, None if self.state is None else first_rows(self.state, width), own)

    def move(self, source: int, target: int) -> None:
        """Continue a row's sequence in another row, which must be free."""
        self._drop_ahead()
        self.rows.move(source, target)
        self.cache.move_row(source, target)
        if self.state is not None:
            index = torch.tensor([source, target], device=self.target.device)
            write_rows(self.state, index[1:], read_rows(self.state, index[:1]))
        self.grammars.move(source, target)
        if self.own is not None:
            self.own.move(source, target)
            self._arranged = None

    def step(self, longest: int, exact: bool) -> Pending:
        """Launch one verification of all rows; the host can read the result at any later time.

        longest: the longest row's committed tokens or, if not `exact`, an upper bound.
        """
        length = None if self.lengths is None else self.lengths.next()
        pending, self.state = self.runner.step(self.state, longest, exact, length)
        return pending

    # Another drafter

    def change_drafter(self, drafter: Any, state: Any, texts: Mapping[int, Sequence[int]]) -> None:
        """Continue with another drafter, between two steps with nothing unread.

        state: of all rows, or None for a fresh one; texts: row -> its prompt and answer so far, for
        rows whose state must be rebuilt.
        """
        self._drop_ahead()
        self._work_with(drafter)
        self.state = self.blank_state(self.drafter) if state is None else state
        for row, text in texts.items():
            self._rebuild(row, text)

    def blank_state(self, drafter: Any) -> Any:
        """A state of all rows without any text."""
        info, like = self.target.info, self.target.weights.embedding
        seen = blank_states(drafter, self.count, info, like)
        with drafter_kernel():
            return drafter.start(seen, self.tree, self.capacity)

    def _rebuild(self, row: int, text: Sequence[int]) -> None:
        """Rebuild a row's drafter state from its text, the root last. If the drafter needs
        features, the target reads the text again, in chunks and with a separate cache; the batch's
        cache does not change."""
        device = self.target.device
        tokens = torch.tensor(text[:-1], device=device)[None]
        index, root = torch.tensor([row], device=device), torch.tensor(text[-1:], device=device)
        lengths, seen = torch.tensor([tokens.shape[1]], device=device), None
        if self.needs.drafts_from_states:
            place = torch.zeros_like(index)
            with self.target.computing(self.decode.exact):
                cache = self.target.new_cache(1, tokens.shape[1])
                chunk = self.decode.prefill_chunk
                seen = self.target.prefill(cache, place, tokens, lengths, self.needs, chunk)[1]
        self._start_drafter(index, tokens, lengths, root, seen)

    def constrain(self, rows: Sequence[int], requests: Sequence[Request]) -> None:
        """Give rows the grammars of their requests."""
        for row, request in zip(rows, requests, strict=True):
            if request.constraint is not None:
                self.grammars.put(row, Grammars.of(self.target).matcher(request.constraint))

    def stop(self) -> None:
        """Deactivate every row, so that the rest of an abandoned run is not decoded."""
        self._drop_ahead()
        self.rows.active.zero_()
        self.grammars.clear()

    def _drop_ahead(self) -> None:
        """Discard what was drafted ahead, as rows change hands."""
        if isinstance(self.drafter, AheadDrafter):
            self.drafter.drop()

    def prefill(
        self,
        index: Tensor,
        tokens: Tensor,
        lengths: Tensor,
        seeds: Tensor,
        budgets: Tensor,
        own: tuple[Sequence[int], Sequence[SamplingSettings]] | None = None,
        masks: Tensor | None = None,
        watch: Callable[[Tensor, Seen, Tensor], None] | None = None,
    ) -> Tensor:
        """Read prompts into rows and pick their first tokens [R].

        index [R] rows, tokens [R, T] right-padded, lengths [R], seeds [R], budgets [R] new tokens
        after the first; all int64. The rows are inactive until `activate`. own: the rows and their
        settings, if rows have separate settings. masks [R, 1, W]: the permitted first tokens
        (`RowGrammars.first_masks`). watch: called with the target's unprocessed logits [R, V], its
        features, and the first tokens.
        """
        held = None
        if self.own is not None and own is not None:
            self.own.put(*own)
            held, self._arranged = self.own.at(own[0]), None
        with self.target.computing(self.decode.exact):
            logits, seen = self.target.prefill(
                self.cache, index, tokens, lengths, self.needs, self.decode.prefill_chunk
            )
        raw, logits = logits, logits[:, None]
        if self.processors.active:
            place = torch.arange(tokens.shape[0], device=tokens.device)
            last = tokens[place, lengths - 1][:, None]
            root = TokenTree.chain(0, tokens.device)
            logits = self.processors(logits, Prefix(tokens, lengths - 1, last, root))
        if masks is not None:
            logits = forbid(logits, masks)
        if self.wishes.ends:
            earliest, eos = self.rows.earliest[index], self.runner.decoder.eos
            logits = without_early_ends(logits, lengths[:, None] - 1, earliest, eos)
        first = self.noise(seeds, lengths, held).target_pick(logits, lengths[:, None])[:, 0]
        if watch is not None:
            watch(raw, seen, first)
        self._start_drafter(index, tokens, lengths, first, seen)
        rows = self.rows
        rows.lengths[index], rows.root[index] = lengths, first
        rows.seeds[index], rows.budget[index] = seeds, budgets
        if rows.history is not None:
            rows.history[index, : tokens.shape[1]] = tokens
            rows.history[index, lengths] = first
        return first

    def _start_drafter(
        self, index: Tensor, tokens: Tensor, lengths: Tensor, first: Tensor, seen: Seen | None
    ) -> None:
        """Start the drafter on new prompts: the whole batch, or the refilled rows. seen: None if
        the drafter reads only tokens."""
        if self.drafter is None:
            return
        place = torch.arange(tokens.shape[1], device=tokens.device)[None]
        following = torch.cat([tokens[:, 1:], tokens[:, :1]], 1)
        following = torch.where(place == lengths[:, None] - 1, first[:, None], following)
        features = (None, None) if seen is None else (seen.taps, seen.last_hidden)
        valid = place < lengths[:, None]
        states = TargetStates(tokens, following, place.expand_as(tokens), valid, *features)
        with drafter_kernel():
            fresh = self.drafter.start(states, self.tree, self.capacity)
        if self.state is None:
            self.state = fresh
        else:
            write_rows(self.state, index, fresh)

    def bytes(self) -> int:
        """Bytes of the target's cache and the drafter's state."""
        return self.cache.bytes() + tensor_bytes(self.state)


@dataclass
class _Narrow:
    """The first rows of a batch as a separate batch, all in views."""

    runner: StepRunner
    state: Any
    own: RowSettings | None
