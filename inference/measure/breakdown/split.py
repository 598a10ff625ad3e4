"""The split: factors that lead from the ceiling to the measured speedup. Their product is exactly
the measured speedup.

The ceiling is the draft's deepest level and the bonus in every pass, at the cost of a plain step:
depth + 1. The distance between it and the measured speedup S = tau * (time of a plain step / time
of a drafted step) is split into steps. Each step is a quotient of two neighbouring quantities, so
everything cancels except the two ends. First acceptance:

    ends         the answer stops: a drafter that is always right needs ceil(tokens / (depth + 1))
                 passes
    vocabulary   the target's mass outside the draft vocabulary
    drafter      1 - TV of both models' distributions as decoding uses them: the most that one
                 candidate per level can give
    coupling     how much of that the shared noise gets (1 at temperature 0)
    candidates   what the best tree of the same size makes of further candidates (above 1)
    shape        what this draft's shape gets, against that best tree
    sample       the rest: other prompts than the sample's, and rates that depend on what was kept
                 before

and then time, from a plain step to a drafted one, in this order:

    widening     verify(n) / verify(1) of the cost curves, on the baseline's verification
    drafting     draft time per pass
    commit       committing accepted tokens, beyond the baseline's
    host         time in none of these phases, and between steps, beyond the baseline's
    clock        the rest of the verification: what the cost curves do not explain

The acceptance terms are rates of the sample under the model of `inference.tune.tree_search` (each
level given the ones above it); `sample` is what that model and the sample leave unexplained;
`clock` is what the cost curves leave unexplained.

Legend: P measured prompts, S prompts of the sample, D depth, W resamples.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import numpy as np

from heads.api.errors import UserError
from inference.measure.breakdown.counts import RESAMPLES, Counts, Rates, expected_tau
from inference.measure.metrics import GAP, Floats, Totals, middle95, ratios
from inference.report.model import LossSplit, LossTerm
from inference.tune.tree_search import SearchedTree, pool_ranks, search_tree

TERMS = (
    *("ends", "vocabulary", "drafter", "coupling", "candidates", "shape", "sample"),
    *("widening", "drafting", "commit", "host", "clock"),
)


@dataclass(frozen=True)
class Measured:
    """What was measured of an arm and its baseline, over the same prompts in the same order.

    repeats: times each prompt was decoded. nodes: of the draft, the root included. widening:
    verify(nodes) / verify(1).
    """

    arm: Totals
    baseline: Totals
    repeats: int
    nodes: int
    widening: float

    def take(self, domain: str) -> Measured:
        """The prompts of one domain."""
        rows = self.arm.domain_rows()[domain]
        return replace(self, arm=self.arm.take(rows), baseline=self.baseline.take(rows))


def split(measured: Measured, counts: Counts, seed: int = 0) -> LossSplit:
    """The terms in the order of `TERMS`; the ceiling times all factors is the speedup."""
    size = len(measured.arm.prompts)
    once = np.ones((1, size))
    drawn = measured.arm.resampled(seed, RESAMPLES)
    factors = _factors(measured, counts, once, counts.once)
    spread = _factors(measured, counts, drawn, counts.draws(seed + 1))
    tau, plain, drafted = _ends(measured, once)
    return LossSplit(
        ceiling=float(counts.depth + 1),
        speedup=float((tau * ratios(plain, drafted))[0]),
        tau=float(tau[0]),
        terms=[
            LossTerm(name=name, factor=float(factors[name][0]), ci95=middle95(spread[name]))
            for name in TERMS
        ],
    )


def _ends(measured: Measured, weights: Floats) -> tuple[Floats, Floats, Floats]:
    """tau, seconds per plain step (one token), seconds per drafted step, all [W]."""
    arm, plain = measured.arm, measured.baseline
    passes = weights @ arm.passes
    return (
        ratios(weights @ arm.committed, passes),
        ratios(weights @ plain.decode_seconds, weights @ plain.committed),
        ratios(weights @ arm.decode_seconds, passes),
    )


def _factors(
    measured: Measured, counts: Counts, weights: Floats, sampled: Floats
) -> dict[str, Floats]:
    """Every term's factor [W]. weights [W, P], sampled [W, S]: of the prompts and the sample's."""
    tau, plain, drafted = _ends(measured, weights)
    tokens = _tokens(measured, counts, weights, sampled, tau)
    seconds = _seconds(measured, weights, plain, drafted)
    # a step's time is in the denominator of speed
    factors = [ratios(after, before) for before, after in pairwise(tokens)]
    factors += [ratios(np.ones(1), ratios(after, before)) for before, after in pairwise(seconds)]
    return dict(zip(TERMS, factors, strict=True))


def _tokens(
    measured: Measured, counts: Counts, weights: Floats, sampled: Floats, tau: Floats
) -> list[Floats]:
    """Tokens per pass [W] from the ceiling to the measured tau, one loss after another."""
    depth, arm = counts.depth, measured.arm
    ceiling = np.full(len(weights), depth + 1.0)
    per_answer = arm.committed / measured.repeats
    fewest = measured.repeats * np.ceil(np.round(per_answer, 6) / (depth + 1))
    ended = ratios(weights @ arm.committed, weights @ fewest)
    rates = Rates.of(counts, sampled)
    # the model does not know the end of an answer, so it is scaled by the loss at the ends
    share = ratios(ended, ceiling)
    best = np.array([best_tree(ranks, measured.nodes).tau for ranks in rates.ranks])
    levels = [expected_tau(part) for part in (rates.covered, rates.overlap, rates.first)]
    levels += [best, expected_tau(rates.kept)]
    return [ceiling, ended, *(share * level for level in levels), tau]


def best_tree(ranks: Floats, nodes: int) -> SearchedTree:
    """The best static tree of `nodes` nodes for acceptance by depth and rank [D, R]."""
    try:
        return search_tree([pool_ranks(level.tolist()) for level in ranks], nodes)
    except UserError:  # nothing was ever accepted: every tree gives only the bonus
        return SearchedTree((), 1.0)


def _seconds(measured: Measured, weights: Floats, plain: Floats, drafted: Floats) -> list[Floats]:
    """Seconds per step [W] from a plain one to a drafted one, one cost after another."""
    arm, base = measured.arm, measured.baseline

    def beyond(*phases: str) -> Floats:
        """Seconds per drafted step in these phases beyond those of a plain one."""
        own = ratios(weights @ arm.spent(*phases), weights @ arm.passes)
        return own - ratios(weights @ base.spent(*phases), weights @ base.committed)

    verify = ratios(weights @ base.seconds["verify"], weights @ base.committed)
    extra = [verify * (measured.widening - 1.0), beyond("draft"), beyond("commit")]
    return [*accumulate([*extra, beyond("other", GAP)], initial=plain), drafted]
