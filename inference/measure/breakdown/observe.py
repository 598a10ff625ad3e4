"""Decodes prompts once more and looks at every distribution: what the target thought behind each
kept token, what the drafter did.

The engine's own step does the decoding; only its acceptance rule is put into a shell that keeps the
last proposal and the target's logits until the host has read what was committed. So the passes are
those of the measurement, for chains and trees alike. Row by row and step by step, for a sample of
prompts.

Legend: N nodes, M committed tokens of a pass, V vocabulary, V' its drafted part, C candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from heads.api.drafter import Proposal
from inference.decoding.config import DecodeConfig
from inference.decoding.engine import Engine
from inference.decoding.requests import PassRecord, Request
from inference.decoding.rules.base import Rule, Verdict
from inference.decoding.sampling.distribution import SamplingSettings, shape_logits
from inference.decoding.sampling.noise import SharedNoise, Stream
from inference.decoding.session import Session
from inference.target.model import TargetModel

FIRST, DRAFTED, CORRECTED, BONUS = "first", "drafted", "corrected", "bonus"
"""Source of a token: prefill; the drafter; the target in place of a rejected draft; the target
after the last draft."""
RANKS = 10
"""Ranks of the drafter's candidates that are counted."""

Candidates = list[tuple[int, float]]


@dataclass(frozen=True)
class State:
    """One committed token with both models' distributions at its position.

    depth: 1 for the token behind the root. by: see `FIRST`. tested: drafted tokens stood there.
    overlap: the sum over tokens of the smaller of both probabilities, as decoding uses them
    (temperature, filters; at temperature 0 all mass on the best token): 1 - TV. own_overlap: the
    same of the models' own distributions. missed: the target's mass outside the draft vocabulary.
    rank: the committed token's among the drafter's candidates, -1 from `RANKS` on. confidence: that
    of the drafter's best candidate, None without one. target, draft: best candidates as (token id,
    probability), of the models' own distributions.
    """

    token: int
    by: str
    depth: int = 0
    number: int = 0
    """Number of the verification, from 1; 0 for the first token."""
    tested: bool = False
    overlap: float = 0.0
    own_overlap: float = 0.0
    missed: float = 0.0
    rank: int = -1
    confidence: float | None = None
    target: Candidates = field(default_factory=list)
    draft: Candidates = field(default_factory=list)


@dataclass
class Watched:
    """An answer as it came about. states: one per token, the first (from prefill) included.
    estimate: where confidences come from, "head" (the drafter's own estimate), "probability" (that
    of its best candidate) or "" (certain drafts).
    """

    request: Request
    states: list[State] = field(default_factory=list)
    estimate: str = ""
    finish: str = ""

    @property
    def tokens(self) -> list[int]:
        return [state.token for state in self.states]


def watch(
    target: TargetModel,
    drafter: Any,
    decode: DecodeConfig,
    requests: Sequence[Request],
    candidates: int = 0,
) -> list[Watched]:
    """Decode `requests` under rule match as `decode` says, one after another. candidates: how many
    of each state are kept."""
    own = replace(decode, rule="match", batch_size=1, graph="off", lag=0, compile=False)
    engine = Engine(target, drafter, own)
    if isinstance(drafter, nn.Module):
        drafter.eval()
    capacity = max(len(request.tokens) + request.max_new_tokens for request in requests)
    watcher = _Watcher(own.sampling(), candidates)
    with Session(engine, capacity, watcher.on_tokens, details=True) as session:
        decoder = session.lanes.runner.decoder
        watcher.rule = _Shell(decoder.rule)
        decoder.rule = watcher.rule
        for request in requests:
            watcher.found[request.index] = Watched(request)
            session.add(request)
        while session.unfinished:
            for done in session.step():
                watcher.found[done.request.index].finish = done.finish
    return [watcher.found[request.index] for request in requests]


class _Shell:
    """A rule that keeps what the one inside it was last asked."""

    name: ClassVar[str] = "match"
    lossless: ClassVar[bool] = True

    def __init__(self, inner: Rule) -> None:
        self.inner = inner
        self.drafts: Stream | None = inner.drafts
        self.keeps_logits = inner.keeps_logits
        self.last: tuple[Proposal, Tensor, Tensor, SharedNoise, Verdict] | None = None

    def judge(
        self, proposal: Proposal, logits: Tensor, positions: Tensor, noise: SharedNoise
    ) -> Verdict:
        verdict = self.inner.judge(proposal, logits, positions, noise)
        self.last = (proposal, logits, positions, noise, verdict)
        return verdict


class _Watcher:
    """Turns passes into states as they are committed."""

    def __init__(self, settings: SamplingSettings, candidates: int) -> None:
        self.settings, self.candidates = settings, candidates
        self.found: dict[int, Watched] = {}
        self.rule: _Shell | None = None

    def on_tokens(self, request: Request, tokens: list[int], record: PassRecord | None) -> None:
        watched = self.found[request.index]
        if record is None:
            watched.states.append(State(tokens[0], FIRST))
            return
        assert self.rule is not None and self.rule.last is not None, "a pass without a verdict"
        number = watched.states[-1].number + 1
        states, estimate = self._pass(tokens, record, number, *self.rule.last)
        watched.states += states
        watched.estimate = watched.estimate or estimate

    def _pass(
        self,
        tokens: list[int],
        record: PassRecord,
        number: int,
        proposal: Proposal,
        logits: Tensor,
        positions: Tensor,
        noise: SharedNoise,
        verdict: Verdict,
    ) -> tuple[list[State], str]:
        """The states of one verification and where its confidences come from."""
        count = len(tokens)
        nodes = verdict.path[0, :count]
        seen = logits[0, nodes].float()  # [M, V]
        tested = [place < record.accepted or record.rejected for place in range(count)]
        draft = _Draft.of(proposal, nodes, positions, noise, seen.shape[-1])
        shaped = (
            _one_hot(seen)
            if self.settings.greedy
            else shape_logits(seen, self.settings).softmax(-1)
        )
        own = seen.softmax(-1)
        overlap = torch.minimum(shaped, draft.shaped(self.settings)).sum(-1).tolist()
        own_overlap = torch.minimum(own, draft.own).sum(-1).tolist()
        missed = [0.0] * count
        if proposal.token_ids is not None:
            outside = torch.ones(seen.shape[-1], device=seen.device).index_fill(
                0, proposal.token_ids, 0.0
            )
            missed = (shaped * outside).sum(-1).tolist()
        ranks = draft.ranks(torch.tensor(tokens, device=seen.device))
        best, drafted = _top(own, self.candidates), _top(draft.own, self.candidates)
        states = []
        for place, token in enumerate(tokens):
            refused = CORRECTED if record.rejected else BONUS
            here = tested[place]
            states.append(
                State(
                    token=token,
                    by=DRAFTED if place < record.accepted else refused,
                    depth=place + 1,
                    number=number,
                    tested=here,
                    overlap=min(1.0, overlap[place]) if here else 0.0,
                    own_overlap=min(1.0, own_overlap[place]) if here else 0.0,
                    missed=missed[place],
                    rank=ranks[place] if here else -1,
                    confidence=draft.confidence[place] if here else None,
                    target=best[place],
                    draft=drafted[place] if here else [],
                )
            )
        return states, draft.estimate


@dataclass
class _Draft:
    """The drafter's side of M states. logits [M, V] over the whole vocabulary, scores [M, V] as
    candidates were ranked; entries of untested states mean nothing. own [M, V]: its own
    distribution.
    """

    logits: Tensor
    scores: Tensor
    own: Tensor
    confidence: list[float | None]
    estimate: str

    @classmethod
    def of(
        cls, proposal: Proposal, nodes: Tensor, positions: Tensor, noise: SharedNoise, vocab: int
    ) -> _Draft:
        """The drafter's side at `nodes` [M] int64 of the one row of `proposal`. positions [1, N]
        int64: of all nodes; noise: that of the decoding; vocab: V, the target's.
        """
        children = _first_children(proposal, nodes)
        if proposal.logits is None:  # certain drafts: all mass on the first child
            tokens = proposal.tokens[0, children]
            logits = torch.full((len(nodes), vocab), float("-inf"), device=tokens.device)
            logits.scatter_(1, tokens[:, None], 0.0)
            scores = logits
        else:
            rows = proposal.logits[:, nodes]
            scores = noise.scores(rows, positions[:, nodes] + 1, proposal.token_ids)[0].float()
            logits = rows[0].float()
            if proposal.token_ids is not None:
                logits, scores = (
                    _spread(values, proposal.token_ids, vocab) for values in (logits, scores)
                )
        own = logits.softmax(-1)
        confidence, estimate = _confidence(proposal, nodes, scores.argmax(-1), own)
        return cls(logits, scores, own, confidence, estimate)

    def shaped(self, settings: SamplingSettings) -> Tensor:
        """What drafts are drawn from [M, V]."""
        if settings.greedy:
            return _one_hot(self.logits)
        return (self.logits / settings.temperature).softmax(-1)

    def ranks(self, tokens: Tensor) -> list[int]:
        """Places [M] of `tokens` [M] among the candidates; -1 from `RANKS` on and where a token is
        none of them."""
        scores = self.scores.gather(1, tokens[:, None])
        better = (self.scores > scores).sum(-1)
        candidate = (better < RANKS) & (scores[:, 0] > float("-inf"))
        return torch.where(candidate, better, -1).tolist()


def _first_children(proposal: Proposal, nodes: Tensor) -> Tensor:
    """The first child [M] of each node; node 0 where there is none."""
    numbers = torch.arange(proposal.tree.num_nodes, device=nodes.device)
    child = (proposal.tree.parents[0] == nodes[:, None]) & (numbers > 0)
    return child.to(torch.int64).argmax(-1)


def _confidence(
    proposal: Proposal, nodes: Tensor, best: Tensor, own: Tensor
) -> tuple[list[float | None], str]:
    """Confidence of the best candidate `best` [M] behind each node, and where it comes from."""
    if proposal.confidence is not None:
        numbers = torch.arange(proposal.tree.num_nodes, device=nodes.device)
        same = (proposal.tree.parents[0] == nodes[:, None]) & (numbers > 0)
        same &= proposal.tokens[0] == best[:, None]
        values = proposal.confidence[0].float()[same.to(torch.int64).argmax(-1)].tolist()
        known = same.any(-1).tolist()
        return [
            value if there else None for value, there in zip(values, known, strict=True)
        ], "head"
    if proposal.logits is None:
        return [None] * len(nodes), ""
    return list(own.gather(1, best[:, None])[:, 0].tolist()), "probability"


def _spread(values: Tensor, token_ids: Tensor, vocab: int) -> Tensor:
    """Columns [M, V'] at their target ids [M, V]; -inf elsewhere."""
    full = torch.full((values.shape[0], vocab), float("-inf"), device=values.device)
    return full.index_copy_(1, token_ids, values)


def _one_hot(logits: Tensor) -> Tensor:
    """All mass [M, V] on the best token."""
    return torch.zeros_like(logits).scatter_(1, logits.argmax(-1, keepdim=True), 1.0)


def _top(probabilities: Tensor, count: int) -> list[Candidates]:
    """The `count` best tokens per row with their probabilities; those without any mass are left
    out."""
    if not count:
        return [[] for _ in range(probabilities.shape[0])]
    found = probabilities.topk(min(count, probabilities.shape[-1]), dim=-1)
    rows = zip(found.indices.tolist(), found.values.tolist(), strict=True)
    return [[(i, p) for i, p in zip(ids, values, strict=True) if p > 0] for ids, values in rows]
