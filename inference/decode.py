"""One step of speculative decoding: propose, verify, accept, commit. Knows tokens and trees, and no kind of drafter.

Plain decoding is the same step with a tree of one node. All tensors have fixed shapes and nothing here asks the device for a
value, so that a step can be captured as a graph; what the host must know (how far the longest row has come) it is told.

Legend: B rows, N nodes, D the tree's deepest level.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from heads.api.drafter import Proposal, TargetStates
from heads.api.features import FeatureSpec
from heads.api.tree import TokenTree
from inference.kv_cache import KVCache
from inference.noise import SharedNoise
from inference.rules.base import Rule, Verdict
from inference.target import Seen, TargetModel

PHASES = ("prefill", "draft", "verify", "commit", "other")


class StepClock:
    """Seconds spent per phase. On CUDA each phase boundary synchronises, so that the split is true; switch it off for speed."""

    def __init__(self, device: torch.device, enabled: bool = True) -> None:
        self._synchronise = device.type == "cuda" and enabled
        self.reset()

    def reset(self) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.passes = 0
        self._last = time.perf_counter()

    def start(self) -> None:
        """Forget the time since the last mark (it belonged to nobody)."""
        if self._synchronise:
            torch.cuda.synchronize()
        self._last = time.perf_counter()

    def mark(self, phase: str) -> None:
        """Book the time since the last mark to `phase`."""
        if self._synchronise:
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.seconds[phase] += now - self._last
        self._last = now

    @property
    def decode_seconds(self) -> float:
        """All seconds but prefill."""
        return sum(value for phase, value in self.seconds.items() if phase != "prefill")


@dataclass
class Rows:
    """The decoding rows on the device.

    lengths [B] committed tokens in the cache (the root is at this position, not yet in the cache), root [B] the last committed
    token, budget [B] new tokens that may still be committed, active [B] bool, seeds [B]; all int64 but `active`.
    """

    lengths: Tensor
    root: Tensor
    budget: Tensor
    active: Tensor
    seeds: Tensor

    @classmethod
    def empty(cls, rows: int, device: torch.device) -> Rows:
        def zeros() -> Tensor:
            return torch.zeros(rows, dtype=torch.int64, device=device)

        return cls(zeros(), zeros(), zeros(), torch.zeros(rows, dtype=torch.bool, device=device), zeros())


@dataclass
class StepResult:
    """What one verification committed, per row.

    tokens [B, D+1] int64, of which the first `committed` [B] count (0 for inactive rows); accepted [B] drafted tokens among them;
    rejected [B] bool: a drafted token was tested and refused; ended [B] bool: end of text or no budget left.
    """

    tokens: Tensor
    committed: Tensor
    accepted: Tensor
    rejected: Tensor
    ended: Tensor


@dataclass
class Decoder:
    """The parts that a step works with; built by `inference.engine.Engine`."""

    target: TargetModel
    drafter: Any
    tree: TokenTree
    noise: SharedNoise
    rule: Rule
    needs: FeatureSpec
    clock: StepClock
    eos: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))  # [E] end-of-text token ids

    def step(self, cache: KVCache, rows: Rows, state: Any, longest: int) -> tuple[StepResult, Any]:
        """Advance every row by one verification; returns what was committed and the drafter's new state.

        longest: the largest of `rows.lengths`, or any upper bound of it when B > 1.
        """
        proposal = self._propose(rows, state)
        self.clock.mark("draft")
        logits, positions, seen = self.target.verify(cache, proposal.tokens, proposal.tree, rows.lengths, longest, self.needs)
        self.clock.mark("verify")
        verdict = self.rule.judge(proposal, logits, positions, self.noise)
        result = self._cut(verdict, rows)
        path = verdict.path
        if not proposal.tree.is_chain:
            cache.compact(rows.lengths, path)
        self.clock.mark("other")
        if self.drafter is not None:
            state = self.drafter.commit(state, self._seen(proposal, result, path, rows, seen))
        advance = result.committed
        last = (advance - 1).clamp(min=0)[:, None]
        rows.root = torch.where(rows.active, result.tokens.gather(1, last)[:, 0], rows.root)
        rows.lengths = rows.lengths + advance
        rows.budget = rows.budget - advance
        rows.active = rows.active & ~result.ended
        self.clock.mark("commit")
        self.clock.passes += 1
        return result, state

    def _propose(self, rows: Rows, state: Any) -> Proposal:
        if self.drafter is None:
            return Proposal(rows.root[:, None], self.tree)
        proposal: Proposal = self.drafter.propose(state, self.noise)
        return proposal

    def _cut(self, verdict: Verdict, rows: Rows) -> StepResult:
        """Cut what the rule kept at end of text and at the row's budget."""
        tokens, full = verdict.tokens, verdict.accepted + 1
        ends = torch.isin(tokens, self.eos)
        place = torch.arange(tokens.shape[1], device=tokens.device)
        first_end = torch.where(ends, place, tokens.shape[1]).amin(1) + 1
        committed = torch.minimum(torch.minimum(full, first_end), rows.budget)
        committed = torch.where(rows.active, committed, 0)
        cut = committed < full
        ended = (committed == first_end) | (committed == rows.budget)
        return StepResult(
            tokens,
            committed,
            torch.where(cut, committed, committed - 1).clamp(min=0),
            verdict.refused & ~cut & rows.active,
            ended & rows.active,
        )

    def _seen(self, proposal: Proposal, result: StepResult, path: Tensor, rows: Rows, seen: Seen) -> TargetStates:
        """What the drafter is told: the accepted run with the target's true states. Inactive rows repeat their root."""
        place = torch.arange(path.shape[1], device=path.device)
        valid = place < result.committed.clamp(min=1)[:, None]
        positions = rows.lengths[:, None] + place
        if proposal.tree.is_chain:
            return TargetStates(proposal.tokens, result.tokens, positions, valid, seen.taps, seen.last_hidden)
        row = torch.arange(path.shape[0], device=path.device)[:, None]
        taps = None if seen.taps is None else seen.taps[row, path]
        return TargetStates(
            proposal.tokens.gather(1, path), result.tokens, positions, valid, taps, seen.last_hidden[row, path]
        )
