"""Searches static trees from measured acceptance, as in Medusa (2401.10774, section 3.2 and
appendix C).

Decoding validation prompts with a chain shows the rank of the target's pick among the drafter's
candidates, at every depth where all drafts before were kept. Assume that these rates hold for every
path of a depth. Then the probability of reaching a node is the product of the rates along its path,
and the tree that keeps the most tokens takes the likeliest nodes first.

    statistics = measure_ranks(target, drafter, requests, DecodeConfig(depth=4))
    found = search_tree(statistics.accuracy(), nodes=26)
    DecodeConfig(shape="tree", choices=found.choices)

Legend: D deepest level, R distinguished ranks, N nodes, M positions per call, V' draft vocabulary.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from heads.api.drafter import Noise, Proposal, TargetStates
from heads.api.errors import UserError
from heads.api.tree import DraftShape
from inference.decoding.config import DecodeConfig
from inference.decoding.engine import Engine
from inference.decoding.requests import Request
from inference.kernels.packed_linear import packed_linears
from inference.target.model import TargetModel


@dataclass
class RankStatistics:
    """How often the target picked the drafter's candidates.

    tested [D]: states at depth d - 1 (all drafts before them kept) at which the target's pick was
    compared with the candidates; hits [D][R]: how often the pick was the candidate of rank r.
    """

    tested: list[int]
    hits: list[list[int]]

    @classmethod
    def empty(cls, depth: int, ranks: int) -> RankStatistics:
        return cls([0] * depth, [[0] * ranks for _ in range(depth)])

    def accuracy(self) -> list[list[float]]:
        """The rates [D][R], which never rise with the rank: rates out of order, caused by small
        counts, are averaged (pool adjacent violators). Raises `UserError` if no state of the first
        depth was seen.
        """
        if not self.tested or not self.tested[0]:
            raise UserError(
                "no drafts were verified, so there are no acceptance rates to search a tree "
                "from. Give prompts whose answers are longer than one token."
            )
        return [
            pool_ranks([count / tested if tested else 0.0 for count in hits])
            for tested, hits in zip(self.tested, self.hits, strict=True)
        ]


def pool_ranks(values: Sequence[float]) -> list[float]:
    """The closest sequence that never rises: neighbours that rise are replaced by their mean."""
    blocks: list[tuple[float, int]] = []  # mean and length
    for value in values:
        mean, length = value, 1
        while blocks and blocks[-1][0] < mean:
            before, count = blocks.pop()
            mean, length = (before * count + mean * length) / (count + length), count + length
        blocks.append((mean, length))
    return [mean for mean, length in blocks for _ in range(length)]


@dataclass(frozen=True)
class SearchedTree:
    """A searched tree. choices: paths of sibling ranks, as in `DecodeConfig.choices`; tau: tokens
    per verification under the model."""

    choices: tuple[tuple[int, ...], ...]
    tau: float


def search_tree(accuracy: Sequence[Sequence[float]], nodes: int) -> SearchedTree:
    """The tree of at most `nodes` nodes, the root included, that keeps the most tokens under the
    model of the module.

    accuracy [D][R]: the rate at which the target picks the candidate of rank r at depth d. Nodes
    that are never reached are left out. Raises `UserError` for invalid rates, rates that rise with
    the rank, and fewer than 2 nodes.
    """
    if nodes < 2 or not accuracy:
        raise UserError(
            f"a searched tree needs at least 2 nodes and one depth; given {nodes} and "
            f"{len(accuracy)}."
        )
    for depth, rates in enumerate(accuracy, 1):
        if (
            not rates
            or min(rates) < 0.0
            or sum(rates) > 1.0 + 1e-9
            or list(rates) != sorted(rates, reverse=True)
        ):
            raise UserError(
                f"the acceptance rates of depth {depth} must be 0 or more, not rise with the rank "
                f"and sum to at most 1; given {[round(rate, 4) for rate in rates]}. "
                "`RankStatistics.accuracy` gives such rates."
            )
    # A node is offered only if its parent and its better sibling, which are at least as likely, are
    # in the tree.
    offered: list[tuple[float, tuple[int, ...]]] = [(-accuracy[0][0], (0,))]
    choices: list[tuple[int, ...]] = []
    tau = 1.0
    while offered and len(choices) < nodes - 1 and offered[0][0] < 0.0:
        negative, path = heapq.heappop(offered)
        choices.append(path)
        tau -= negative
        depth, rank = len(path), path[-1]
        rates = accuracy[depth - 1]
        if rank + 1 < len(rates):
            heapq.heappush(
                offered, (negative / rates[rank] * rates[rank + 1], (*path[:-1], rank + 1))
            )
        if depth < len(accuracy):
            heapq.heappush(offered, (negative * accuracy[depth][0], (*path, 0)))
    if not choices:
        raise UserError(
            "the target never picked a drafted candidate: there is no tree to search. Train the "
            "drafter longer."
        )
    return SearchedTree(tuple(sorted(choices, key=lambda path: (len(path), path))), tau)


def measure_ranks(
    target: TargetModel,
    drafter: Any,
    requests: Iterable[Request],
    decode: DecodeConfig,
    ranks: int = 10,
) -> RankStatistics:
    """Decode `requests` with chains of `decode.depth` and count the ranks of the target's picks, at
    `decode.temperature` with shared Gumbel noise. It decodes row by row, for validation prompts,
    and is not meant to be fast.
    """
    recorder = _Recorder(drafter, RankStatistics.empty(decode.depth, ranks), ranks)
    chain = replace(
        decode, shape="chain", rule="match", batch_size=1, graph="off", lag=0, compile=False
    )
    if isinstance(drafter, nn.Module):
        drafter.eval()
    with packed_linears(drafter):
        for _ in Engine(target, recorder, chain).run(requests):
            pass
    return recorder.statistics


class _Recorder:
    """A drafter that wraps another one and records what was accepted; one row at a time."""

    def __init__(self, inner: Any, statistics: RankStatistics, ranks: int) -> None:
        self.inner, self.kind, self.needs = inner, inner.kind, inner.needs
        self.statistics, self.ranks = statistics, ranks
        self.candidates: list[list[int]] = []

    def start(self, seen: TargetStates, tree: DraftShape, capacity: int) -> Any:
        return self.inner.start(seen, tree, capacity)

    def propose(self, state: Any, noise: Noise) -> Proposal:
        watching = _WatchingNoise(noise, self.ranks)
        proposal: Proposal = self.inner.propose(state, watching)
        # If a drafter does not use the noise, its drafts are certain and its only candidates.
        asked = torch.cat(watching.ranked, 1) if watching.ranked else proposal.tokens[:, 1:, None]
        assert asked.shape[:2] == (1, len(self.statistics.tested)), "one row, one choice per depth"
        self.candidates = asked[0].tolist()
        return proposal

    def commit(self, state: Any, accepted: TargetStates) -> Any:
        # Entry i is the target's pick after the first i drafts, all of which were kept.
        picks = accepted.next_tokens[0, : int(accepted.lengths[0])].tolist()
        for depth, (pick, candidates) in enumerate(zip(picks, self.candidates, strict=False)):
            self.statistics.tested[depth] += 1
            if pick in candidates:
                self.statistics.hits[depth][candidates.index(pick)] += 1
        return self.inner.commit(state, accepted)


class _WatchingNoise:
    """Wraps a noise and records the best candidates of every choice: target ids [B, M, R]."""

    def __init__(self, noise: Noise, ranks: int) -> None:
        self.noise, self.ranks = noise, ranks
        self.keeps_logits, self.separate = noise.keeps_logits, noise.separate
        self.ranked: list[Tensor] = []

    def scores(self, logits: Tensor, positions: Tensor, token_ids: Tensor | None = None) -> Tensor:
        found = self.noise.scores(logits, positions, token_ids)
        columns = found.topk(min(self.ranks, found.shape[-1]), dim=-1).indices
        self.ranked.append(columns if token_ids is None else token_ids[columns])
        return found

    def pick(self, logits: Tensor, positions: Tensor, token_ids: Tensor | None = None) -> Tensor:
        return self.scores(logits, positions, token_ids).argmax(-1)

    def tempered(self, logits: Tensor) -> Tensor:
        return self.noise.tempered(logits)
