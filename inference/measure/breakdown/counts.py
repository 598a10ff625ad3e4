"""Sums over the observed states, per prompt and depth, so that every rate is a ratio of sums and
can be resampled over prompts.

Legend: S prompts of the sample, D deepest drafted level, R ranks, C bins of confidence, W resamples
(1 for the figure itself).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from inference.measure.breakdown.observe import DRAFTED, FIRST, RANKS, Watched
from inference.measure.metrics import Floats, PerPrompt, divide, interval95, middle95, ratios
from inference.measure.prompts import Prompt
from inference.report.model import CalibrationBin, CalibrationGap, DraftStates

BINS = 10
RESAMPLES = 500
"""Resamples of the loss split, each of which computes the best tree again."""


@dataclass(frozen=True)
class Counts(PerPrompt):
    """passes, committed [S]. By depth [S, D]: reached, states at which a token of that depth was
    due; kept, those with a draft that was kept; tested, those with drafts; overlap and own_overlap,
    summed over the tested; missed, summed over the reached. ranks [S, D, R]: tested states by rank
    of the target's pick. bins [S, C, 3]: states with a confidence, the sum of the confidences, how
    often the best candidate was the target's pick.
    """

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

    @classmethod
    def of(
        cls,
        answers: Sequence[Watched],
        prompts: Sequence[Prompt],
        depth: int,
        first: int = 0,
        end: int = 0,
    ) -> Counts:
        """Sum `answers` (of `prompts`). depth: D. first, end: the part of the answers
        that counts; end 0: everything from `first` on."""
        size = len(answers)
        passes, committed = np.zeros((2, size))
        reached, kept, tested, overlap, own_overlap, missed = np.zeros((6, size, depth))
        ranks, bins = np.zeros((size, depth, RANKS)), np.zeros((size, BINS, 3))
        for row, answer in enumerate(answers):
            states = [state for state in answer.states[first : end or None] if state.by != FIRST]
            committed[row] = len(states)
            passes[row] = len({state.number for state in states})
            for state in states:
                if state.depth > depth:
                    continue
                at = row, state.depth - 1
                reached[at] += 1
                kept[at] += state.by == DRAFTED
                missed[at] += state.missed
                if not state.tested:
                    continue
                tested[at] += 1
                overlap[at] += state.overlap
                own_overlap[at] += state.own_overlap
                if state.rank >= 0:
                    ranks[*at, state.rank] += 1
                if state.confidence is not None:
                    cell = min(BINS - 1, int(state.confidence * BINS))
                    bins[row, cell] += (1, state.confidence, state.rank == 0)
        return cls(
            [prompt.id for prompt in prompts],
            [prompt.domain for prompt in prompts],
            passes,
            committed,
            reached,
            kept,
            tested,
            overlap,
            own_overlap,
            missed,
            ranks,
            bins,
            units=[prompt.unit for prompt in prompts],
        )

    @property
    def depth(self) -> int:
        return self.reached.shape[1]

    @property
    def once(self) -> Floats:
        """Weights [1, S] of the sample itself."""
        return np.ones((1, len(self.prompts)))

    def draws(self, seed: int) -> Floats:
        """Bootstrap weights [W, S] over the sample's prompts."""
        return self.resampled(seed, RESAMPLES)

    def states(self, seed: int, depth: int | None = None) -> DraftStates:
        """The rates of the drafted tokens at one depth; None: of all depths together."""

        def column(values: Floats) -> Floats:
            return values.sum(1) if depth is None else values[:, depth - 1]

        weights, tested = self.draws(seed), column(self.tested)
        rates: dict[str, Any] = {}
        for name in ("accepted", "overlap", "own_overlap", "missed"):
            top = self.kept if name == "accepted" else getattr(self, name)
            bottom = column(self.reached) if name == "missed" else tested
            rates[name], rates[f"{name}_ci95"] = rate_with_interval(column(top), bottom, weights)
        return DraftStates(tested=int(tested.sum()), **rates)

    def calibration_gap(self, seed: int) -> CalibrationGap:
        """ECE (mean of |confidence - accepted| over bins, by count) with its interval."""
        bins = np.einsum("ws,scx->wcx", self.draws(seed), self.bins)
        return CalibrationGap(
            ece=float(_ece(self.bins.sum(0)[None])[0]), ece_ci95=middle95(_ece(bins))
        )

    def calibration_bins(self) -> list[CalibrationBin]:
        """Mean confidence and accepted share of every bin."""
        return [
            CalibrationBin(
                count=int(number),
                confidence=float(ratios(confidence, number)),
                accepted=float(ratios(accepted, number)),
            )
            for number, confidence, accepted in self.bins.sum(0)
        ]


@dataclass(frozen=True)
class Rates:
    """Acceptance by depth under resampling weights, all [W, D], given that the depths above were
    kept.

    kept: of the reached; overlap: mean over the tested (1 - TV); covered: 1 - the
    target's mass outside the draft vocabulary; first: the target's pick was the drafter's best
    candidate, of the tested. ranks [W, D, R].
    """

    kept: Floats
    overlap: Floats
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
            covered=1.0 - ratios(weights @ counts.missed, reached),
            first=ratios(ranks[:, :, 0], tested),
            ranks=ratios(ranks, tested[:, :, None]),
        )


def expected_tau(rates: Floats) -> Floats:
    """Tokens per pass [W] of a chain whose levels are kept at the rates [W, D]."""
    return 1.0 + np.cumprod(rates, axis=1).sum(1)


def rate_with_interval(
    numerators: Floats, denominators: Floats, weights: Floats
) -> tuple[float, tuple[float, float]]:
    """Ratio of sums over prompts [S] and its interval under `weights` [W, S]."""
    drawn = weights @ denominators
    if not drawn.any():
        return 0.0, (0.0, 0.0)
    rate = divide(numerators.sum(), denominators.sum())
    return rate, interval95(weights @ numerators, drawn)


def _ece(bins: Floats) -> Floats:
    """ECE [W] of bins [W, C, 3]: the sum of |summed confidence - hits| over bins, by all cases."""
    return ratios(np.abs(bins[:, :, 1] - bins[:, :, 2]).sum(1), bins[:, :, 0].sum(1))
