"""One step of speculative decoding: propose, verify, accept, commit. It is independent of kinds.

Plain decoding is the same step with a tree of one node. All tensors have fixed shapes, state is
updated in place, and nothing here waits for a value from the device. So a step can be captured as a
graph and replayed. If the host knows the longest row's length, it passes it to the step, which then
reads less of the cache.

Legend: B rows, N nodes, D the tree's deepest level, S slots.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from heads.api.drafter import Proposal, TargetStates, Verified
from heads.api.features import FeatureSpec
from heads.api.tree import DraftShape, TokenTree
from inference.decoding.adaptive.lengths import Limits
from inference.decoding.ahead import AheadDrafter
from inference.decoding.clock import StepClock
from inference.decoding.logprobs import token_logprobs
from inference.decoding.pass_details import pass_details
from inference.decoding.rules.base import Rule, Verdict
from inference.decoding.sampling.noise import SharedNoise
from inference.decoding.sampling.processors import Prefix, Processors
from inference.decoding.structured.leading import LedNoise
from inference.decoding.structured.rows import RowGrammars
from inference.kernels.drafter_attention import drafter_kernel
from inference.target.kv_cache import KVCache
from inference.target.model import TargetModel
from inference.target.taps import Seen


@dataclass
class Rows:
    """The decoding rows on the device, updated in place; int64 unless noted.

    lengths [B]: committed tokens in the cache (the root is at this position, not yet in the cache);
    root [B]: the last committed token; budget [B]: new tokens that may still be committed; active
    [B] bool; seeds [B]; endless [B] bool: end of text does not end the row; earliest [B]: the first
    position at which end of text is allowed; history [B, S]: prompt and committed tokens, the root
    included, for sampling settings that depend on the text, otherwise None.
    """

    lengths: Tensor
    root: Tensor
    budget: Tensor
    active: Tensor
    seeds: Tensor
    endless: Tensor
    earliest: Tensor
    history: Tensor | None = None

    @classmethod
    def empty(cls, rows: int, device: torch.device, history_slots: int = 0) -> Rows:
        """Inactive rows. history_slots: S, or 0 for rows without a history."""
        zeros = torch.zeros(rows, dtype=torch.int64, device=device)
        lengths, root, budget, seeds, earliest = (zeros.clone() for _ in range(5))
        history = lengths.new_zeros(rows, history_slots) if history_slots else None
        return cls(lengths, root, budget, lengths > 0, seeds, lengths > 0, earliest, history)

    def first(self, count: int) -> Rows:
        """The first `count` rows, as views."""
        kept = {k: part[:count] for k, part in vars(self).items() if part is not None}
        return Rows(**kept)

    def move(self, source: int, target: int) -> None:
        """Copy a row over another one and deactivate the first."""
        for part in vars(self).values():
            if part is not None:
                part[target] = part[source]
        self.active[source] = False

    def advance(self, result: StepResult) -> None:
        """Take over what a step committed."""
        advance = result.committed
        if self.history is not None:
            place = torch.arange(1, result.tokens.shape[1] + 1, device=advance.device)
            slots = (self.lengths[:, None] + place).clamp(max=self.history.shape[1] - 1)
            # tokens that were not committed are overwritten before they are read
            self.history.scatter_(1, slots, result.tokens)
        last = (advance - 1).clamp(min=0)[:, None]
        self.root.copy_(torch.where(self.active, result.tokens.gather(1, last)[:, 0], self.root))
        self.lengths.add_(advance)
        self.budget.sub_(advance)
        self.active.logical_and_(~result.ended)


@dataclass
class StepResult:
    """What one verification committed, per row.

    tokens [B, D+1] int64, of which the first `committed` [B] count (0 for inactive rows); accepted
    [B]: drafted tokens among them; rejected [B] bool: a drafted token was tested and rejected;
    ended [B] bool: end of text or no budget left; live [B] int64: drafted levels that counted
    (`Proposal.limit`). details [B, 3 D + 2] int64: see `inference.decoding.pass_details`; None if
    not requested. logprobs [B, D+1, 2 K + 1] int64 of `tokens`
    (`inference.decoding.logprobs.token_logprobs`); None if no row asks for them.
    """

    tokens: Tensor
    committed: Tensor
    accepted: Tensor
    rejected: Tensor
    ended: Tensor
    live: Tensor
    details: Tensor | None = None
    logprobs: Tensor | None = None

    def packed(self, times: Tensor | None = None) -> Tensor:
        """Everything in one int64 tensor for one copy to the host: [B, D+6] columns, then details
        and log-probabilities (`unpacked` splits these), then the step's times [P]
        (`StepClock.times`), the same in every row."""
        flags = [self.rejected.to(torch.int64), self.ended.to(torch.int64)]
        counts = [self.committed, self.accepted, *flags, self.live]
        behind = [] if self.details is None else [self.details]
        if self.logprobs is not None:
            behind.append(self.logprobs.flatten(1))
        if times is not None:
            behind.append(times.expand(self.tokens.shape[0], -1))
        return torch.cat([torch.stack(counts, 1), self.tokens, *behind], 1)


def unpacked(
    numbers: list[int], details: bool, columns: int
) -> tuple[list[int], list[int], list[list[int]]]:
    """Split the numbers after a row's five counts in `StepResult.packed`, without times: tokens
    [D+1], details, log-probabilities [D+1][columns]. details: whether there are any; columns: of
    log-probabilities, or 0."""
    # (D + 1) (1 + columns) numbers, and 3 (D + 1) - 1 of details
    count = (len(numbers) + details) // (1 + columns + 3 * details)
    end = count + (3 * count - 1 if details else 0)
    rest = range(end, len(numbers), columns or 1)
    return numbers[:count], numbers[count:end], [numbers[i : i + columns] for i in rest]


@dataclass
class StepWishes:
    """Rarely used features that rows of a batch ask for, set before a step is launched. A captured
    or compiled step belongs to one combination. logprobs: log-probabilities; ends: end of text is
    forbidden before `Rows.earliest`."""

    logprobs: bool = False
    ends: bool = False

    @property
    def key(self) -> tuple[bool, bool]:
        return self.logprobs, self.ends


@dataclass
class Decoder:
    """The parts that a step works with; built by `inference.decoding.buffers.Lanes`."""

    target: TargetModel
    drafter: Any
    tree: DraftShape
    noise: SharedNoise
    rule: Rule
    processors: Processors
    needs: FeatureSpec
    clock: StepClock
    eos: Tensor  # [E] int64: end-of-text token ids
    limits: Limits | None = None  # adaptive length
    details: bool = False  # passes report what was drafted
    exact: bool = False  # see inference/target/exact.py
    grammars: RowGrammars | None = None  # structured output
    wishes: StepWishes = field(default_factory=StepWishes)  # shared by the decoders of a batch

    def step(
        self,
        cache: KVCache,
        rows: Rows,
        state: Any,
        longest: int | None,
        exact: bool = True,
        length: int | None = None,
    ) -> tuple[StepResult, Any]:
        """Advance every row by one verification; returns what was committed and the drafter's
        state.

        longest: the largest of `rows.lengths` or, if not `exact`, an upper bound; None: only the
        device knows it. length: drafted tokens of this step's chain, if not the whole chain.
        """
        grammars = self.grammars if self.constrained else None
        self.clock.border("")
        with drafter_kernel():
            proposal = self._propose(rows, state, length)
        if self.limits is not None:
            proposal = self.limits.apply(proposal, rows.active, now=longest is not None and exact)
        if grammars is not None:
            grammars.ask(proposal)
        if isinstance(self.drafter, AheadDrafter):
            self._draft_ahead(self.drafter, proposal, rows, state)
        self.clock.border("draft")
        with self.target.computing(self.exact):
            logits, positions, seen = self.target.verify(
                cache, proposal.tokens, proposal.tree, rows.lengths, longest, self.needs, exact
            )
        self.clock.border("verify")
        raw, logits = logits, self._permitted(logits, positions, rows, proposal)
        verdict = self.rule.judge(proposal, logits, positions, self.noise)
        result = self._cut(verdict, rows, proposal)
        if self.limits is not None:
            self.limits.observe(proposal, result.accepted, result.rejected, rows.active)
        if self.details:
            result.details = pass_details(proposal, logits, verdict, result.accepted)
        if self.wishes.logprobs:
            row = torch.arange(raw.shape[0], device=raw.device)[:, None]
            result.logprobs = token_logprobs(raw[row, verdict.path], verdict.tokens)
        cache.commit(proposal.tree, rows.lengths, verdict.path, verdict.accepted, result.committed)
        self.clock.border("other")
        if self.drafter is not None:
            accepted = self._seen(proposal, result, verdict.path, rows, seen)
            if self.needs.verified:
                picks = self.noise.target_pick(logits, positions + 1)
                accepted.verified = Verified(proposal.tokens, picks, proposal.tree, verdict.path)
            with drafter_kernel():
                state = self.drafter.commit(state, accepted)
        rows.advance(result)
        self.clock.border("commit")
        return result, state

    @property
    def constrained(self) -> bool:
        """Whether a row has a grammar; the step then waits for the host once."""
        return self.grammars is not None and self.grammars.active

    def _permitted(
        self, logits: Tensor, positions: Tensor, rows: Rows, proposal: Proposal
    ) -> Tensor:
        """The target's logits [B, N, V] after processors, with -inf at tokens that a grammar or the
        minimum length forbids."""
        if self.processors.active:
            prefix = None
            if rows.history is not None:
                prefix = Prefix(rows.history, rows.lengths, proposal.tokens, proposal.tree)
            logits = self.processors(logits, prefix)
        if self.constrained and self.grammars is not None:
            self.grammars.fill()
            logits = self.grammars.forbid(logits)
        if self.wishes.ends:
            logits = without_early_ends(logits, positions, rows.earliest, self.eos)
        return logits

    def _propose(self, rows: Rows, state: Any, length: int | None) -> Proposal:
        if self.drafter is None:
            assert isinstance(self.tree, TokenTree)
            return Proposal(rows.root[:, None], self.tree)
        if self.drafter.needs.forced and self.grammars is not None:
            assert self.grammars.forced is not None
            self.drafter.guide(state, self.grammars.forced[: rows.root.shape[0]])
        noise = self._leading(rows)
        drawn = self.noise if noise is None else noise
        if length is not None and self.limits is not None:
            proposal = self.limits.propose(self.drafter, state, drawn, length, rows.root)
        else:
            proposal = cast(Proposal, self.drafter.propose(state, drawn))
        return proposal if noise is None else noise.led(proposal)

    def _leading(self, rows: Rows) -> LedNoise | None:
        """The drafter's noise of a step in which a row has a grammar, if it draws its tokens
        now."""
        if not self.constrained or self.grammars is None or self.grammars.lead is None:
            return None
        lead = self.grammars.lead.first(rows.root.shape[0])
        return LedNoise(self.noise, lead, rows.lengths, self.tree.is_chain)

    def _draft_ahead(
        self, drafter: AheadDrafter, proposal: Proposal, rows: Rows, state: Any
    ) -> None:
        """Let the drafter draft from the outcome that it assumes for the verification."""
        tokens, full = drafter.guess
        committed, _ = self._count(tokens, full, rows)
        valid, positions = self._places(committed, tokens, rows)
        run = TargetStates(proposal.tokens, tokens, positions, valid)
        drafter.begin(state, run, rows.active, rows.lengths + committed, self.noise)

    def _count(self, tokens: Tensor, full: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
        """How many [B] of the first `full` [B] tokens [B, D+1] are committed, up to end of text and
        within the row's budget, and whether the row then ends [B]."""
        place = torch.arange(tokens.shape[1], device=tokens.device)
        ends = (tokens[..., None] == self.eos).any(-1) & ~rows.endless[:, None]
        first_end = torch.where(ends, place, tokens.shape[1]).amin(1) + 1
        committed = torch.minimum(torch.minimum(full, first_end), rows.budget)
        committed = torch.where(rows.active, committed, 0)
        return committed, (committed == first_end) | (committed == rows.budget)

    def _places(self, committed: Tensor, tokens: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
        """Which entries of a committed run count, and their positions [B, D+1]; for inactive rows,
        only the root counts."""
        place = torch.arange(tokens.shape[1], device=tokens.device)
        return place < committed.clamp(min=1)[:, None], rows.lengths[:, None] + place

    def _cut(self, verdict: Verdict, rows: Rows, proposal: Proposal) -> StepResult:
        """Cut the kept tokens at end of text and at the row's budget."""
        tokens, full = verdict.tokens, verdict.accepted + 1
        committed, ended = self._count(tokens, full, rows)
        cut = committed < full
        accepted = torch.where(cut, committed, committed - 1).clamp(min=0)
        rejected, live = verdict.refused & ~cut & rows.active, proposal.limit
        live = torch.full_like(full, proposal.tree.max_depth) if live is None else live
        return StepResult(tokens, committed, accepted, rejected, ended & rows.active, live)

    def _seen(
        self, proposal: Proposal, result: StepResult, path: Tensor, rows: Rows, seen: Seen
    ) -> TargetStates:
        """What the drafter receives: the accepted run with the target's states; the root for
        inactive rows."""
        valid, positions = self._places(result.committed, path, rows)
        tokens, taps, hidden = proposal.tokens, seen.taps, seen.last_hidden
        if not proposal.tree.is_chain:
            row = torch.arange(path.shape[0], device=path.device)[:, None]
            tokens, hidden = tokens.gather(1, path), hidden[row, path]
            taps = None if taps is None else taps[row, path]
        return TargetStates(tokens, result.tokens, positions, valid, taps, hidden)


def without_early_ends(logits: Tensor, positions: Tensor, earliest: Tensor, eos: Tensor) -> Tensor:
    """Logits [B, N, V] with -inf for end of text `eos` [E] if the token after a node is before the
    row's `earliest` [B]; positions [B, N]: the nodes'."""
    early = (positions + 1 < earliest[:, None])[..., None]
    held = logits.index_select(-1, eos).masked_fill(early, float("-inf"))
    return logits.index_copy(-1, eos, held)
