"""Adaptive draft length of chains: fewer tokens where acceptance is unlikely.

There are two mechanisms. Within a step, every row gets a `Proposal.limit` (`Limits`): drafted
tokens beyond it are dead, neither kept nor tested. Where the host knows the limits without waiting
(on a CPU, step by step), the chain is cut to the longest limit before it is verified. Between
steps, the host chooses the next step's length from a few (`Lengths`), by the acceptance of past
steps and the cost of passes. One graph per length is captured.

No decision here biases the text. Under rule match every committed token is the target's pick. Rules
that weigh drafts assume that a draft was drawn from its q; a decision to verify a token that
depends on the token itself breaks this assumption. So the decision on level j of a row depends on
the levels above it and on the distribution that level j was drawn from, not on the token drawn.
Levels are admitted from the top, and admission ends at the first level that is not admitted, so
deeper levels have no influence on higher ones. DSpark's appendix A gives the counterexample of a
scheduler that looks at drawn tokens: 0.7 becomes 0.85;
`tests/inference/decoding/test_adaptive.py` tests both schedulers against the exact distribution.
The next step's length depends on finished steps only.

Legend: B rows, D drafted tokens of a chain, N = D + 1 nodes, V vocabulary, F features of a level.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from heads.api.drafter import Proposal
from heads.api.errors import UserError
from heads.api.tree import TokenTree
from heads.nn.drafting.plan import TreePlan
from inference.decoding.adaptive import head
from inference.decoding.rules.accept import leading

DEFAULT_THRESHOLDS = {"entropy": 2.0, "confidence": 0.3}
DECAY = 0.98
"""Share of its weight that a counted pass of `Lengths` keeps per pass."""


@dataclass(frozen=True)
class AdaptiveSettings:
    """The adaptive-length settings of `DecodeConfig`, named without the prefix `adaptive_`."""

    mode: str = "none"
    threshold: float = 0.0
    lengths: tuple[int, ...] = ()
    head: str = ""

    @property
    def active(self) -> bool:
        return self.mode != "none" or bool(self.lengths)

    def check(self, shape: str, depth: int, rule: str) -> None:
        """Raise `UserError` for invalid settings."""
        if not self.active:
            return
        if shape != "chain":
            raise UserError(
                "decode.adaptive and decode.adaptive_lengths work on chains; given: "
                f"decode.shape={shape}. A dynamic tree already chooses its nodes by confidence: "
                "set decode.nodes."
            )
        same = {"specinfer": "rejection", "traversal": "block"}.get(rule)
        if same is not None:
            raise UserError(
                "decode.adaptive and decode.adaptive_lengths do not go with "
                f"decode.rule={rule}: for chains it is {same}, so set decode.rule={same}."
            )
        if self.threshold < 0 or (self.mode == "confidence" and self.threshold > 1):
            raise UserError(
                "decode.adaptive_threshold must be at least 0 (entropy: largest root of the "
                "entropy) and at most 1 for confidence (least probability that a draft is "
                f"reached); given: {self.threshold}."
            )
        lengths = self.lengths
        if lengths and (
            list(lengths) != sorted(set(lengths)) or lengths[0] < 0 or lengths[-1] != depth
        ):
            raise UserError(
                "decode.adaptive_lengths must ascend without repetition, start at 0 or more and "
                f"end with decode.depth; given: {list(lengths)} and {depth}."
            )


# Within a step


def entropies(logits: Tensor, temperature: float) -> Tensor:
    """Entropy in nats [B, M] of logits [B, M, V'] that drafts are drawn from; untempered at 0."""
    return head.entropy((logits.float() / (temperature or 1.0)).log_softmax(-1))


def admit(chance: Tensor, active: Tensor, seconds: Tensor, early_stop: bool = True) -> Tensor:
    """DSpark's scheduler (2607.05147): the limits [B] int64 with the most expected tokens per
    second.

    chance [B, D]: probability that level j is accepted given that the one above it was; active [B]
    bool; seconds [M+1]: duration of a verification of m tokens, m up to B * (D + 1). Candidates
    (row, level) are admitted in descending probability of being reached and accepted, as long as
    the expected tokens per second rise. early_stop: end admission at the first candidate that does
    not raise them. Without it, admission continues to the global maximum; deeper levels then
    influence higher ones, which biases the text of rules that weigh drafts. Only the test of this
    bias turns it off.
    """
    rows, depth = chance.shape
    survival = (chance.float().cumprod(1) * active[:, None]).flatten()
    ordered, order = survival.sort(descending=True, stable=True)
    base = active.sum()
    expected = base + torch.nn.functional.pad(ordered.cumsum(0), (1, 0))
    tokens = base + torch.arange(rows * depth + 1, device=chance.device)
    rate = expected / seconds[tokens.clamp(max=seconds.shape[0] - 1)]
    if early_stop:
        admitted = leading((rate[1:] > rate[:-1])[None])[0]
    else:
        admitted = rate.argmax()
    taken = torch.zeros_like(survival, dtype=torch.bool)
    taken.scatter_(0, order, torch.arange(rows * depth, device=chance.device) < admitted)
    return leading(taken.view(rows, depth) & active[:, None])


class Limits:
    """Sets every row's limit; see the module. seconds [M+1]: see `admit`; for throughput only."""

    def __init__(
        self,
        settings: AdaptiveSettings,
        temperature: float,
        depth: int,
        seconds: Tensor | None,
        device: torch.device,
    ) -> None:
        self.settings, self.temperature, self.seconds = settings, temperature, seconds
        self.head = head.AcceptanceHead.load(settings.head, device) if settings.head else None
        self.recorder: list[head.Recorded] | None = None
        self.chains = [TokenTree.chain(length, device) for length in range(depth + 1)]
        self.plans = [TreePlan.of(chain) for chain in self.chains]

    @property
    def wants_logits(self) -> bool:
        """Whether drafters must keep the logits that drafts were drawn from."""
        return self.settings.mode != "none"

    def chance(self, proposal: Proposal) -> Tensor | None:
        """The estimated probability [B, D] that a level is accepted given the one above it, or
        None.

        A trained head takes precedence, then the drafter's confidence, then its best probability.
        """
        logits = None if proposal.logits is None else proposal.logits[:, :-1]
        if self.head is not None and logits is not None:
            return self.head.chance(head.level_features(logits, self.temperature))
        if proposal.confidence is not None:
            return proposal.confidence[:, 1:]
        if logits is None:
            return None
        return (logits.float() / (self.temperature or 1.0)).softmax(-1).amax(-1)

    def limit(self, proposal: Proposal, active: Tensor) -> Tensor | None:
        """The deepest level [B] int64 worth verifying; None: no limit."""
        mode, threshold = self.settings.mode, self.settings.threshold
        if mode == "none" or not proposal.tree.is_chain or proposal.tree.max_depth == 0:
            return None
        if mode == "entropy":
            if proposal.logits is None:
                return None
            found = entropies(proposal.logits[:, :-1], self.temperature)
            return leading(found.clamp(min=0).sqrt() <= threshold)
        chance = self.chance(proposal)
        if chance is None:
            return None
        if mode == "confidence":
            return leading(chance.cumprod(1) >= threshold)
        assert self.seconds is not None
        return admit(chance, active, self.seconds)

    def apply(self, proposal: Proposal, active: Tensor, now: bool) -> Proposal:
        """`proposal` with its limit; now: cut the chain after the longest limit of active rows."""
        found = self.limit(proposal, active)
        if found is None:
            return proposal
        limit = found if proposal.limit is None else torch.minimum(found, proposal.limit)
        proposal = replace(proposal, limit=limit)
        return self.cut(proposal, int(torch.where(active, limit, 0).max())) if now else proposal

    def cut(self, proposal: Proposal, length: int) -> Proposal:
        """The first `length` drafted tokens of a chain."""
        if length >= proposal.tree.max_depth or not proposal.tree.is_chain:
            return proposal
        return self._first(proposal, length)

    def _first(self, proposal: Proposal, length: int) -> Proposal:
        kept: dict[str, Any] = {"tree": self.chains[length]}
        for name in ("tokens", "logits", "confidence"):
            part = getattr(proposal, name)
            kept[name] = None if part is None else part[:, : length + 1]
        if proposal.limit is not None:
            kept["limit"] = proposal.limit.clamp(max=length)
        return replace(proposal, **kept)

    def observe(
        self, proposal: Proposal, accepted: Tensor, refused: Tensor, active: Tensor
    ) -> None:
        """Record the tested tokens for `head.fit`: accepted [B]; refused, active [B] bool."""
        if self.recorder is not None and proposal.logits is not None:
            tested = accepted + refused.to(torch.int64)
            logits = proposal.logits[:, :-1]
            self.recorder.append(head.record(logits, self.temperature, accepted, tested, active))

    def propose(self, drafter: Any, state: Any, noise: Any, length: int, root: Tensor) -> Proposal:
        """A chain of `length` tokens after `root` [B]. Drafters that draft level by level from a
        `TreePlan` draft only that many; the drafts of others are cut."""
        if length == 0:
            return Proposal(root[:, None], self.chains[0])
        own = getattr(state, "plan", None)
        if not isinstance(own, TreePlan) or not own.tree.is_chain or length >= own.max_depth:
            return self.cut(drafter.propose(state, noise), length)
        state.plan = self.plans[length]
        try:
            # drafters that compute all levels at once still return all of them
            return self._first(drafter.propose(state, noise), length)
        finally:
            state.plan = own


# Between steps


class Lengths:
    """Chooses the next step's length by expected tokens per second, from finished steps.

    Acceptance is counted per level; old passes lose weight (`DECAY` per pass). The estimate of a
    level that was not tried for a while returns to that of the level above it, so that a length
    which once did not pay is tried again.
    """

    def __init__(self, lengths: Sequence[int], seconds: Sequence[float]) -> None:
        self.lengths = tuple(lengths)
        self.seconds = dict(zip(self.lengths, seconds, strict=True))
        self.tried = [0.0] * (max(self.lengths) + 1)
        self.kept = [0.0] * (max(self.lengths) + 1)

    def observe(self, accepted: int, live: int) -> None:
        """Count a pass of one row that tested up to `live` drafted tokens and kept `accepted`."""
        for level in range(1, len(self.tried)):
            self.tried[level] *= DECAY
            self.kept[level] *= DECAY
            if level <= min(accepted + 1, live):
                self.tried[level] += 1
                self.kept[level] += level <= accepted

    def chances(self) -> list[float]:
        """Estimated acceptance per level given the one above; the prior 0.8 weighs two passes."""
        found, before = [], 0.8
        for level in range(1, len(self.tried)):
            before = (self.kept[level] + 2 * before) / (self.tried[level] + 2)
            found.append(before)
        return found

    def next(self) -> int:
        """The length with the best expected tokens per second."""
        chances, best, choice = self.chances(), 0.0, self.lengths[-1]
        for length in self.lengths:
            expected, reached = 1.0, 1.0
            for chance in chances[:length]:
                reached *= chance
                expected += reached
            rate = expected / self.seconds[length]
            if rate > best:
                best, choice = rate, length
        return choice
