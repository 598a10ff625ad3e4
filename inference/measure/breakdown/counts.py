"""Sums over what was watched, per prompt and depth, so that every rate is a ratio of sums and can be resampled over prompts.

Legend: S prompts of the sample, D deepest drafted level, R ranks, C bins of confidence, W resamples (1 for the figure itself).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from inference.measure.breakdown.observe import DRAFTED, FIRST, RANKS, State, Watched
from inference.measure.metrics import Floats, divide, interval95, middle95, ratios, resample_weights

BINS = 10
RESAMPLES = 500
"""Of the loss split: each asks for the best tree anew."""
POSITIONS = ((1, 17), (17, 33), (33, 65), (65, 129), (129, 257), (257, 0))
"""Places in the answer that are told apart: [first, end), the last without an end. Place 0 is the token that prefill gives."""


@dataclass(frozen=True)
class Counts:
    """passes, committed [S]. By depth [S, D]: reached, states at which a token of that depth was due; kept, those at which a draft
    stood and was kept; tested, those at which drafts stood; overlap and own_overlap, summed over the tested; missed, summed over
    the reached. ranks [S, D, R]: tested states by rank of the target's pick. bins [S, C, 3]: states with a confidence, the sum of
    the confidences, how often the best candidate was the target's pick.
    """

    prompts: list[str]
    domains: list[str]
    passes: Floats
    committed: Floats
    reached: Floats
    kept: Floats
    tested: Floats
    overlap: Floats
    own_overlap: Floats
    missed: Floats
    ranks: Floats
    bins: Floats

    @property
    def depth(self) -> int:
        return self.reached.shape[1]

    def take(self, rows: Sequence[int]) -> Counts:
        """The counts of some prompts."""
        index = np.asarray(rows, dtype=np.int64)
        names = ("passes", "committed", "reached", "kept", "tested", "overlap", "own_overlap", "missed", "ranks", "bins")
        parts: dict[str, Any] = {name: getattr(self, name)[index] for name in names}
        return Counts([self.prompts[i] for i in rows], [self.domains[i] for i in rows], **parts)

    def domain_rows(self) -> dict[str, list[int]]:
        """Domain -> its rows, in alphabetical order."""
        return {name: [i for i, d in enumerate(self.domains) if d == name] for name in sorted(set(self.domains))}


def count(
    answers: Sequence[Watched],
    prompts: Sequence[str],
    domains: Sequence[str],
    depth: int,
    wanted: Callable[[int, State], bool] = lambda place, state: True,
) -> Counts:
    """Sum up `answers` (of `prompts`, in `domains`). depth: D. wanted(place in the answer, state): which states count."""
    size = len(answers)
    by_depth = {name: np.zeros((size, depth)) for name in ("reached", "kept", "tested", "overlap", "own_overlap", "missed")}
    ranks, bins = np.zeros((size, depth, RANKS)), np.zeros((size, BINS, 3))
    passes, committed = np.zeros(size), np.zeros(size)
    for row, answer in enumerate(answers):
        numbers = set()
        for place, state in enumerate(answer.states):
            if state.by == FIRST or not wanted(place, state):
                continue
            committed[row] += 1
            numbers.add(state.number)
            if state.depth > depth:
                continue
            at = state.depth - 1
            by_depth["reached"][row, at] += 1
            by_depth["kept"][row, at] += state.by == DRAFTED
            by_depth["missed"][row, at] += state.missed
            if not state.tested:
                continue
            by_depth["tested"][row, at] += 1
            by_depth["overlap"][row, at] += state.overlap
            by_depth["own_overlap"][row, at] += state.own_overlap
            if state.rank >= 0:
                ranks[row, at, state.rank] += 1
            if state.confidence is not None:
                place_of = min(BINS - 1, int(state.confidence * BINS))
                bins[row, place_of] += (1, state.confidence, state.rank == 0)
        passes[row] = len(numbers)
    return Counts(list(prompts), list(domains), passes, committed, **by_depth, ranks=ranks, bins=bins)


@dataclass(frozen=True)
class Rates:
    """Acceptance by depth under resampling weights, all [W, D]; given that the depths above were kept.

    kept: of the reached; overlap, own_overlap: mean over the tested (1 - TV); covered: 1 - the target's mass outside the draft
    vocabulary; first: the target's pick was the drafter's best candidate, of the tested. ranks [W, D, R].
    """

    kept: Floats
    overlap: Floats
    own_overlap: Floats
    covered: Floats
    first: Floats
    ranks: Floats

    @classmethod
    def of(cls, counts: Counts, weights: Floats) -> Rates:
        """weights [W, S]: how often each prompt counts."""
        reached, tested = weights @ counts.reached, weights @ counts.tested
        ranks = np.einsum("ws,sdr->wdr", weights, counts.ranks)
        return cls(
            kept=ratios(weights @ counts.kept, reached),
            overlap=ratios(weights @ counts.overlap, tested),
            own_overlap=ratios(weights @ counts.own_overlap, tested),
            covered=1.0 - ratios(weights @ counts.missed, reached),
            first=ratios(ranks[:, :, 0], tested),
            ranks=ratios(ranks, tested[:, :, None]),
        )


def ones(counts: Counts) -> Floats:
    """Weights [1, S] of the sample itself."""
    return np.ones((1, len(counts.prompts)))


def draws(counts: Counts, seed: int) -> Floats:
    """Bootstrap weights [W, S] over the sample's prompts."""
    return resample_weights(len(counts.prompts), seed, RESAMPLES)


def expected_tau(rates: Floats) -> Floats:
    """Tokens per pass [W] of a chain whose levels are kept at these rates [W, D], each given the one above: 1 + sum of products."""
    return 1.0 + np.cumprod(rates, axis=1).sum(1)


def rate_with_interval(numerators: Floats, denominators: Floats, weights: Floats) -> tuple[float, list[float]]:
    """Ratio of sums over prompts [S] and its interval under `weights` [W, S]; resamples without a single case are left out."""
    drawn = weights @ denominators
    if not drawn.any():
        return 0.0, [0.0, 0.0]
    low, high = interval95(weights @ numerators, drawn)
    return divide(numerators.sum(), denominators.sum()), [low, high]


def state_rates(counts: Counts, weights: Floats, depth: int | None = None) -> dict[str, Any]:
    """What the tables say of a group of states: how many were tested, the share kept, the overlaps, the missed mass.

    depth: one level; None: all together.
    """

    def column(values: Floats) -> Floats:
        return values.sum(1) if depth is None else values[:, depth - 1]

    found: dict[str, Any] = {"tested": int(column(counts.tested).sum())}
    pairs: Mapping[str, tuple[Floats, Floats]] = {
        "accepted": (counts.kept, counts.tested),
        "overlap": (counts.overlap, counts.tested),
        "own_overlap": (counts.own_overlap, counts.tested),
        "missed": (counts.missed, counts.reached),
    }
    for name, (top, bottom) in pairs.items():
        found[name], found[f"{name}_ci95"] = rate_with_interval(column(top), column(bottom), weights)
    return found


def calibration(counts: Counts, weights: Floats) -> dict[str, Any]:
    """Reliability of the confidences: ECE (mean of |confidence - accepted| over bins, by count) with its interval, and the bins."""
    total = counts.bins.sum(0)
    return {
        "ece": float(_ece(total[None])[0]),
        "ece_ci95": list(middle95(_ece(np.einsum("ws,scx->wcx", weights, counts.bins)))),
        "bins": [
            {
                "count": int(number),
                "confidence": float(ratios(said, number)),
                "accepted": float(ratios(kept, number)),
            }
            for number, said, kept in total
        ],
    }


def _ece(bins: Floats) -> Floats:
    """ECE [W] of bins [W, C, 3]: the sum of |summed confidence - hits| over bins, by all cases."""
    return ratios(np.abs(bins[:, :, 1] - bins[:, :, 2]).sum(1), bins[:, :, 0].sum(1))
