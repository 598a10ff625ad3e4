"""Sums over what was watched, per prompt and depth, so that every rate is a ratio of sums and can
be resampled over prompts.

Legend: S prompts of the sample, D deepest drafted level, R ranks, C bins of confidence, W resamples
(1 for the figure itself).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import numpy as np

from inference.measure.breakdown.observe import DRAFTED, FIRST, RANKS, State, Watched
from inference.measure.metrics import Floats, divide, interval95, middle95, ratios, resample_weights
from inference.report.model import CalibrationBin, CalibrationGap, DraftStates

BINS = 10
RESAMPLES = 500
"""Of the loss split: each asks for the best tree anew."""
POSITIONS = ((1, 17), (17, 33), (33, 65), (65, 129), (129, 257), (257, 0))
"""Parts of an answer: positions [first, end), the last part without an end. Position 0 is the token
of prefill."""


@dataclass(frozen=True)
class Counts:
    """passes, committed [S]. By depth [S, D]: reached, states at which a token of that depth was
    due; kept, those at which a draft stood and was kept; tested, those at which drafts stood;
    overlap and own_overlap, summed over the tested; missed, summed over the reached. ranks [S, D,
    R]: tested states by rank of the target's pick. bins [S, C, 3]: states with a confidence, the
    sum of the confidences, how often the best candidate was the target's pick.
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
        prompts, domains = ([names[i] for i in rows] for names in (self.prompts, self.domains))
        arrays = {
            item.name: getattr(self, item.name)[index]
            for item in fields(self)
            if item.name not in ("prompts", "domains")
        }
        return Counts(prompts, domains, **arrays)

    def domain_rows(self) -> dict[str, list[int]]:
        """Domain -> its rows, in alphabetical order."""
        return {
            name: [i for i, d in enumerate(self.domains) if d == name]
            for name in sorted(set(self.domains))
        }


def count(
    answers: Sequence[Watched],
    prompts: Sequence[str],
    domains: Sequence[str],
    depth: int,
    wanted: Callable[[int, State], bool] = lambda place, state: True,
) -> Counts:
    """Sum up `answers` (of `prompts`, in `domains`). depth: D. wanted(place in the answer, state):
    which states count."""
    size = len(answers)
    by_depth = {
        name: np.zeros((size, depth))
        for name in ("reached", "kept", "tested", "overlap", "own_overlap", "missed")
    }
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
    return Counts(
        list(prompts), list(domains), passes, committed, **by_depth, ranks=ranks, bins=bins
    )


@dataclass(frozen=True)
class Rates:
    """Acceptance by depth under resampling weights, all [W, D]; given that the depths above were
    kept.

    kept: of the reached; overlap, own_overlap: mean over the tested (1 - TV); covered: 1 - the
    target's mass outside the draft vocabulary; first: the target's pick was the drafter's best
    candidate, of the tested. ranks [W, D, R].
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
    """Tokens per pass [W] of a chain whose levels are kept at these rates [W, D], each given the
    one above: 1 + sum of products."""
    return 1.0 + np.cumprod(rates, axis=1).sum(1)


def rate_with_interval(
    numerators: Floats, denominators: Floats, weights: Floats
) -> tuple[float, tuple[float, float]]:
    """Ratio of sums over prompts [S] and its interval under `weights` [W, S].

    Resamples whose denominators are all 0 are left out.
    """
    drawn = weights @ denominators
    if not drawn.any():
        return 0.0, (0.0, 0.0)
    rate = divide(numerators.sum(), denominators.sum())
    return rate, interval95(weights @ numerators, drawn)


def state_rates(counts: Counts, weights: Floats, depth: int | None = None) -> DraftStates:
    """The rates of the drafted tokens at one depth; None: of all depths together."""

    def column(values: Floats) -> Floats:
        return values.sum(1) if depth is None else values[:, depth - 1]

    def rate(top: Floats, bottom: Floats) -> tuple[float, tuple[float, float]]:
        return rate_with_interval(column(top), column(bottom), weights)

    accepted, accepted_ci95 = rate(counts.kept, counts.tested)
    overlap, overlap_ci95 = rate(counts.overlap, counts.tested)
    own_overlap, own_overlap_ci95 = rate(counts.own_overlap, counts.tested)
    missed, missed_ci95 = rate(counts.missed, counts.reached)
    return DraftStates(
        tested=int(column(counts.tested).sum()),
        accepted=accepted,
        accepted_ci95=accepted_ci95,
        overlap=overlap,
        overlap_ci95=overlap_ci95,
        own_overlap=own_overlap,
        own_overlap_ci95=own_overlap_ci95,
        missed=missed,
        missed_ci95=missed_ci95,
    )


def calibration_gap(counts: Counts, weights: Floats) -> CalibrationGap:
    """ECE (mean of |confidence - accepted| over bins, by count) with its interval."""
    drawn = np.einsum("ws,scx->wcx", weights, counts.bins)
    return CalibrationGap(
        ece=float(_ece(counts.bins.sum(0)[None])[0]), ece_ci95=middle95(_ece(drawn))
    )


def calibration_bins(counts: Counts) -> list[CalibrationBin]:
    """Mean confidence and accepted share of every bin."""
    return [
        CalibrationBin(
            count=int(number),
            confidence=float(ratios(confidence, number)),
            accepted=float(ratios(accepted, number)),
        )
        for number, confidence, accepted in counts.bins.sum(0)
    ]


def _ece(bins: Floats) -> Floats:
    """ECE [W] of bins [W, C, 3]: the sum of |summed confidence - hits| over bins, by all cases."""
    return ratios(np.abs(bins[:, :, 1] - bins[:, :, 2]).sum(1), bins[:, :, 0].sum(1))
