"""Decodes prompts once more and observes, behind each kept token, the distributions of the target
and of the drafter.

The engine's own step does the decoding. Only its acceptance rule is wrapped: the wrapper keeps the
last proposal and the target's logits until the host has read the committed tokens. So the passes
are those of the measurement, for chains and trees alike. A sample of prompts is decoded row by row
and step by step.

Legend: N nodes, M committed tokens of a pass, V vocabulary, V' its drafted part, C candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from heads.api.drafter import Proposal
from inference.decoding.config import DecodeConfig
from inference.decoding.engine import Engine
from inference.decoding.requests import PassRecord, Request
from inference.decoding.rules.base import Rule, Verdict
from inference.decoding.sampling.distribution import SamplingSettings, over_vocabulary, shape_logits
from inference.decoding.sampling.noise import SharedNoise, Stream
from inference.decoding.session import Session
from inference.target.model import TargetModel

Source = Literal["first", "drafted", "corrected", "bonus"]
"""The source of a token: prefill; the drafter; the target in place of a rejected draft; the target
after the last draft."""
SOURCES = FIRST, DRAFTED, CORRECTED, BONUS = get_args(Source)
RANKS = 10
"""Number of the drafter's candidate ranks that are counted."""

Candidates = list[tuple[int, float]]


@dataclass(frozen=True)
class State:
    """One committed token with both models' distributions at its position.

    depth: 1 for the token behind the root. by: see `Source`. tested: drafted tokens existed there.
    overlap: the sum over tokens of the smaller of both probabilities, as decoding uses them
    (temperature, filters; at temperature 0 all mass on the best token): 1 - TV. own_overlap: the
    same of the models' own distributions. missed: the target's mass outside the draft vocabulary.
    rank: the committed token's among the drafter's candidates, -1 from `RANKS` on. confidence: that
    of the drafter's best candidate, None without one. target, draft: best candidates as (token id,
    probability), of the models' own distributions.
    """

    token: int
    by: Source
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
    """An answer with its states, one per token. estimate: where confidences come from, "head" (the
    drafter's own), "probability" (of its best candidate) or "" (certain drafts)."""

    request: Request
    states: list[State] = field(default_factory=list)
    estimate: str = ""
    finish: str = ""


def watch(
    target: TargetModel,
    drafter: Any,
    decode: DecodeConfig,
    requests: Sequence[Request],
    candidates: int = 0,
) -> list[Watched]:
    """Decode `requests` under rule match, one after another. candidates: number that is kept."""
    own = replace(decode, rule="match", batch_size=1, graph="off", lag=0, compile=False)
    engine = Engine(target, drafter, own)
    if isinstance(drafter, torch.nn.Module):
        drafter.eval()
    capacity = max(len(request.tokens) + request.max_new_tokens for request in requests)
    watcher = _Watcher(own.sampling(), candidates)
    with Session(engine, capacity, watcher.on_tokens, details=True) as session:
        decoder = session.lanes.runner.decoder
        rule, decoder.rule = decoder.rule, watcher
        watcher.inner, watcher.drafts, watcher.keeps_logits = rule, rule.drafts, rule.keeps_logits
        for request in requests:
            watcher.found[request.index] = Watched(request)
            session.add(request)
        while session.unfinished:
            for done in session.step():
                watcher.found[done.request.index].finish = done.finish
    return [watcher.found[request.index] for request in requests]


class _Watcher:
    """A rule that wraps another one. It keeps the last arguments of the inner rule and turns passes
    into states when they are committed."""

    name: ClassVar[str] = "match"

    def __init__(self, settings: SamplingSettings, candidates: int) -> None:
        self.settings, self.candidates = settings, candidates
        self.found: dict[int, Watched] = {}
        self.inner: Rule
        self.drafts: Stream | None = None
        self.keeps_logits, self.separate = True, False
        self.last: tuple[Proposal, Tensor, Tensor, SharedNoise, Verdict] | None = None

    def judge(
        self, proposal: Proposal, logits: Tensor, positions: Tensor, noise: SharedNoise
    ) -> Verdict:
        verdict = self.inner.judge(proposal, logits, positions, noise)
        self.last = (proposal, logits, positions, noise, verdict)
        return verdict

    def on_tokens(self, request: Request, tokens: list[int], record: PassRecord | None) -> None:
        """Turn the pass that committed `tokens` into states of `request`; record None stands for
        prefill."""
        watched = self.found[request.index]
        if record is None:
            watched.states.append(State(tokens[0], FIRST))
            return
        assert self.last is not None, "a pass without a verdict"
        proposal, logits, positions, noise, verdict = self.last
        number = watched.states[-1].number + 1
        nodes = verdict.path[0, : len(tokens)]
        seen = logits[0, nodes].float()  # [M, V]
        draft = _Draft.of(proposal, nodes, positions, noise, seen.shape[-1])
        greedy, own = self.settings.greedy, seen.softmax(-1)
        shaped = _one_hot(seen) if greedy else shape_logits(seen, self.settings).softmax(-1)
        overlap = torch.minimum(shaped, draft.shaped(self.settings)).sum(-1).tolist()
        own_overlap = torch.minimum(own, draft.own).sum(-1).tolist()
        missed = [0.0] * len(tokens)
        if proposal.token_ids is not None:
            outside = torch.ones(seen.shape[-1], device=seen.device)
            outside.index_fill_(0, proposal.token_ids, 0.0)
            missed = (shaped * outside).sum(-1).tolist()
        ranks = draft.ranks(torch.tensor(tokens, device=seen.device))
        best, drafted = _top(own, self.candidates), _top(draft.own, self.candidates)
        for place, token in enumerate(tokens):
            kept = place < record.accepted
            by: Source = DRAFTED if kept else CORRECTED if record.rejected else BONUS
            state = State(token, by, place + 1, number, missed=missed[place], target=best[place])
            if kept or record.rejected:
                state = replace(
                    state,
                    tested=True,
                    overlap=min(1.0, overlap[place]),
                    own_overlap=min(1.0, own_overlap[place]),
                    rank=ranks[place],
                    confidence=draft.confidence[place],
                    draft=drafted[place],
                )
            watched.states.append(state)
        watched.estimate = watched.estimate or draft.estimate


@dataclass
class _Draft:
    """The drafter's side of M states. logits [M, V] over the whole vocabulary, scores [M, V] as
    candidates were ranked, own [M, V] its own distribution; those of untested states are
    undefined."""

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
        int64: of all nodes; vocab: V, the target's."""
        numbers = torch.arange(proposal.tree.num_nodes, device=nodes.device)
        child = (proposal.tree.parents[0] == nodes[:, None]) & (numbers > 0)  # [M, N]
        if proposal.logits is None:  # certain drafts: all mass on the first child, if any
            tokens = proposal.tokens[0, child.int().argmax(-1)]
            logits = torch.full((len(nodes), vocab), float("-inf"), device=tokens.device)
            logits.scatter_(1, tokens[:, None], 0.0)
            scores = logits
        else:
            rows = proposal.logits[:, nodes]
            scores = noise.scores(rows, positions[:, nodes] + 1, proposal.token_ids)[0].float()
            logits = rows[0].float()
            logits, scores = (
                over_vocabulary(values, proposal.token_ids, vocab) for values in (logits, scores)
            )
        own, best = logits.softmax(-1), scores.argmax(-1, keepdim=True)
        if proposal.confidence is not None:
            same = child & (proposal.tokens[0] == best)
            values = proposal.confidence[0].float()[same.int().argmax(-1)].tolist()
            known = zip(values, same.any(-1).tolist(), strict=True)
            return cls(logits, scores, own, [x if there else None for x, there in known], "head")
        if proposal.logits is None:
            return cls(logits, scores, own, [None] * len(nodes), "")
        return cls(logits, scores, own, own.gather(1, best)[:, 0].tolist(), "probability")

    def shaped(self, settings: SamplingSettings) -> Tensor:
        """The distribution that drafts are drawn from [M, V]."""
        if settings.greedy:
            return _one_hot(self.logits)
        return (self.logits / settings.temperature).softmax(-1)

    def ranks(self, tokens: Tensor) -> list[int]:
        """Ranks [M] of `tokens` [M] among the candidates; -1 from `RANKS` on and for other
        tokens."""
        scores = self.scores.gather(1, tokens[:, None])
        better = (self.scores > scores).sum(-1)
        candidate = (better < RANKS) & (scores[:, 0] > float("-inf"))
        return torch.where(candidate, better, -1).tolist()


def _one_hot(logits: Tensor) -> Tensor:
    """All mass [M, V] on the best token."""
    return torch.zeros_like(logits).scatter_(1, logits.argmax(-1, keepdim=True), 1.0)


def _top(probabilities: Tensor, count: int) -> list[Candidates]:
    """The `count` best tokens per row that have a probability above 0."""
    found = probabilities.topk(min(count, probabilities.shape[-1]), dim=-1)
    rows = zip(found.indices.tolist(), found.values.tolist(), strict=True)
    return [[(i, p) for i, p in zip(ids, values, strict=True) if p > 0] for ids, values in rows]
